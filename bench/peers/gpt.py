"""The GPT of bench/gpt.h, and its sizes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

# vocabulary, width, heads, layers, length, batch
CONFIGS = {
    "tiny": (256, 128, 4, 12, 64, 4),
    "124M": (50304, 768, 12, 12, 1024, 8),
    "774M": (50304, 1280, 20, 36, 1024, 8),
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length, _batch):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, ids):
    """The loss of predicting each token from the tokens up to it."""
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids.view(-1))


def make_ids(config, device):
    vocabulary, length, batch = config[0], config[4], config[5]
    return torch.randint(0, vocabulary, (batch, length), device=device)


def add_setting(parser):
    """--config and --device."""
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
