#!/usr/bin/env python3
"""Exports a small language model, for the trainer: gpt --model OUT.pt2

    export_model.py OUT.pt2            a Llama with random weights, if transformers is there
    export_model.py OUT.pt2 --plain    a GPT of plain torch; made tiny_gpt.pt2

Both take token numbers below 256, in any batch and any length up to 64.
"""

import argparse
import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))

import tessera_export
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 48, 4, 2, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def llama():
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH))


def main():
    parser = argparse.ArgumentParser(description="Exports a small language model.")
    parser.add_argument("out")
    parser.add_argument("--plain", action="store_true", help="the GPT, also where transformers is there")
    options = parser.parse_args()
    torch.manual_seed(0)
    plain = options.plain or importlib.util.find_spec("transformers") is None
    model = Gpt() if plain else llama()
    ids = torch.randint(0, VOCABULARY, (4, 16))
    sizes = {0: torch.export.Dim("batch", min=1, max=1024), 1: torch.export.Dim("length", min=2, max=LENGTH)}
    print(tessera_export.export(model, (ids,), None, (sizes,), options.out, outputs=["logits"]))


if __name__ == "__main__":
    main()
