// A GPT as a LibTorch user writes it, without Tessera.
#pragma once

#include <torch/torch.h>

namespace bench {

struct GptConfig {
  int64_t vocabulary = 256;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t layers = 12;
  int64_t length = 64;
  int64_t batch = 4;
};

/// torch::nn::Linear's own forward adds the bias of three-dimensional inputs in
/// a second operator, and again in backward.
inline torch::Tensor linear(
    const torch::nn::Linear& layer,
    const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptConfig& config)
      : heads(config.heads),
        norm1(register_module(
            "norm1",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})))),
        norm2(register_module(
            "norm2",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})))),
        qkv(register_module(
            "qkv",
            torch::nn::Linear(config.width, 3 * config.width))),
        out(register_module(
            "out",
            torch::nn::Linear(config.width, config.width))),
        up(register_module(
            "up",
            torch::nn::Linear(config.width, 4 * config.width))),
        down(register_module(
            "down",
            torch::nn::Linear(4 * config.width, config.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    // Three of (batch, heads, length, width / heads). They are cut from the
    // last dimension, so that backward puts their gradients together in one
    // copy.
    const auto parts = linear(qkv, norm1(x)).chunk(3, -1);
    const auto by_head = [&](const torch::Tensor& part) {
      return part.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    const auto attended = torch::scaled_dot_product_attention(
        by_head(parts[0]),
        by_head(parts[1]),
        by_head(parts[2]),
        {},
        /*dropout_p=*/0.0,
        /*is_causal=*/true);
    x = x + linear(out, attended.transpose(1, 2).flatten(2));
    return x + linear(down, torch::gelu(linear(up, norm2(x))));
  }

  int64_t heads;
  torch::nn::LayerNorm norm1;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear qkv;
  torch::nn::Linear out;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& config)
      : tokens(register_module(
            "tokens",
            torch::nn::Embedding(config.vocabulary, config.width))),
        positions(register_module(
            "positions",
            torch::nn::Embedding(config.length, config.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})))),
        head(register_module(
            "head",
            torch::nn::Linear(
                torch::nn::LinearOptions(config.width, config.vocabulary)
                    .bias(false)))) {
    for (int64_t i = 0; i < config.layers; ++i) {
      blocks->push_back(Block(config));
    }
  }

  torch::Tensor forward(const torch::Tensor& ids) {
    return torch::linear(hidden(ids), head->weight);
  }

  /// What the head turns into logits: (batch, length, width).
  torch::Tensor hidden(const torch::Tensor& ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1), ids.device()));
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return norm(x);
  }

  torch::nn::Embedding tokens;
  torch::nn::Embedding positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Gpt);

} // namespace bench
