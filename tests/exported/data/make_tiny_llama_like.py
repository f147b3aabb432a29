"""Writes tiny_llama_like.pt2: a decoder in the manner of Llama, from plain torch, with random weights.

Usage: make_tiny_llama_like.py FILE

256 tokens (bytes), 2 layers of width 32; batch and length are dynamic. The docs train it and the tests load it. Places in
Python sources are left out, so that the file does not depend on where it was made.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (y * cos + torch.cat(y.chunk(2, dim=-1)[::-1], dim=-1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class TinyLlamaLike(nn.Module):
    def __init__(self, vocabulary=256, width=32, heads=2, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        half = width // heads // 2
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(half) / half), persistent=False)

    def forward(self, input_ids):
        with torch.no_grad():
            angle = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * self.inverse
            cos = torch.cat((angle, angle), dim=-1).cos()
            sin = torch.cat((-angle, angle), dim=-1).sin()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return {"logits": self.head(self.norm(x))}


def without_places(module):
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            for node in each.graph.nodes:
                for key in ("stack_trace", "from_node", "source_fn_stack", "torch_fn"):
                    node.meta.pop(key, None)


def main():
    torch.manual_seed(0)
    model = TinyLlamaLike().train()
    shapes = ({0: Dim("batch", min=1, max=1024), 1: Dim("length", min=2, max=4096)},)
    program = torch.export.export(model, (torch.randint(0, 256, (3, 16)),), dynamic_shapes=shapes, strict=False)
    without_places(program.graph_module)
    torch.export.save(program, sys.argv[1])


if __name__ == "__main__":
    main()
