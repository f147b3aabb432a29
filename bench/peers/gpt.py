"""The GPT of bench/gpt.h."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from sizes import CONFIGS

LARGE_VOCABULARY = 1000  # from here on logits are not held, as in bench/setting.h


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # Cut from the last dimension, so that backward puts their gradients together in one copy.
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length, _batch):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets=None, is_chunked=True):
        """Logits; with targets the loss, inside of forward, where FSDP has the head's weight.
        Logits of a large vocabulary are not held then, unless is_chunked is False."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        is_large = self.head.out_features >= LARGE_VOCABULARY
        if targets is not None and is_large and is_chunked and has_chunked_loss():
            return chunked_loss(x, self.head.weight, targets)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def has_chunked_loss():
    """PyTorch has one from 2.13 on."""
    return hasattr(F, "linear_cross_entropy")


def chunked_loss(hidden, weight, targets):
    """PyTorch's loss that never holds the logits. It knows no autocast."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.flatten(0, -2), weight, targets.view(-1), options=options)


def loss_of(model, ids, is_chunked=True):
    """The loss of predicting each token from the tokens up to it."""
    return model(ids, ids, is_chunked)


def make_ids(config, device):
    vocabulary, length, batch = config[0], config[4], config[5]
    return torch.randint(0, vocabulary, (batch, length), device=device)


def add_setting(parser):
    """--config and --device."""
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
