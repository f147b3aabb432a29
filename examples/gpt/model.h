// A GPT in the shape of GPT-2, as a LibTorch user writes it. Nothing in this
// file knows about Tessera.
#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "model_config.h"

namespace gpt {

/// torch::nn::Linear's own forward adds the bias of three-dimensional inputs in
/// a second operator, and again in backward.
inline torch::Tensor linear(
    const torch::nn::Linear& layer,
    const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// Attention, then a perceptron, each added to its input.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptConfig& config)
      : heads(config.heads), dropout(config.dropout) {
    using torch::nn::LayerNorm;
    using torch::nn::LayerNormOptions;
    using torch::nn::Linear;
    const int64_t width = config.width;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
    qkv = register_module("qkv", Linear(width, 3 * width));
    out = register_module("out", Linear(width, width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x) { // (rows, length, width)
    x = x + drop(linear(out, attend(linear(qkv, norm1(x)))));
    return x + drop(linear(down, torch::gelu(linear(up, norm2(x)), "tanh")));
  }

  torch::Tensor attend(const torch::Tensor& queries_keys_values) {
    // Three of (rows, heads, length, width / heads). They are cut from the last
    // dimension, so that backward puts their gradients together in one copy.
    const auto parts = queries_keys_values.chunk(3, -1);
    const auto by_head = [this](const torch::Tensor& part) {
      return part.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    return torch::scaled_dot_product_attention(
               by_head(parts[0]),
               by_head(parts[1]),
               by_head(parts[2]),
               /*attn_mask=*/{},
               /*dropout_p=*/is_training() ? dropout : 0.0,
               /*is_causal=*/true)
        .transpose(1, 2)
        .flatten(2);
  }

  torch::Tensor drop(const torch::Tensor& x) {
    return dropout > 0 ? torch::dropout(x, dropout, is_training()) : x;
  }

  int64_t heads;
  double dropout;
  torch::nn::LayerNorm norm1{nullptr};
  torch::nn::LayerNorm norm2{nullptr};
  torch::nn::Linear qkv{nullptr};
  torch::nn::Linear out{nullptr};
  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& gpt_config) : config(gpt_config) {
    using torch::nn::Embedding;
    tokens =
        register_module("tokens", Embedding(config.vocabulary, config.width));
    positions =
        register_module("positions", Embedding(config.length, config.width));
    blocks = register_module("blocks", torch::nn::Sequential());
    for (int64_t i = 0; i < config.layers; ++i) {
      blocks->push_back(Block(config));
    }
    norm = register_module(
        "norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    initialize();
  }

  /// ids: (rows, length) int64. Returns logits, (rows, length, vocabulary).
  torch::Tensor forward(const torch::Tensor& ids) {
    // As in GPT-2, the embedding is also the output layer.
    return torch::linear(hidden(ids), tokens->weight);
  }

  /// What the output layer turns into logits: (rows, length, width).
  torch::Tensor hidden(const torch::Tensor& ids) {
    const auto places = torch::arange(ids.size(1), ids.options());
    auto x = tokens(ids) + positions(places);
    x = torch::dropout(x, config.dropout, is_training());
    return norm(blocks->forward(x));
  }

  /// GPT-2's initialisation: small normal weights, biases of zero.
  void initialize() {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() == 2) {
        parameter.value().normal_(0.0, 0.02);
      } else if (parameter.key().ends_with("bias")) {
        parameter.value().zero_();
      }
    }
  }

  const GptConfig config;
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Embedding positions{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt);

} // namespace gpt
