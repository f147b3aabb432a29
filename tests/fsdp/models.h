// Models as users write them, without Tessera.
#pragma once

#include <torch/torch.h>

namespace tessera::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(3 * width, width))) {}

  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::gelu(up(norm(x))));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

/// Blocks between an embedding and a projection, tied if asked.
struct StackImpl : torch::nn::Module {
  StackImpl(int64_t vocabulary, int64_t width, int64_t depth, bool tied = false)
      : embed(
            register_module("embed", torch::nn::Embedding(vocabulary, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < depth; ++i) {
      blocks->push_back(Block(width));
    }
    head = register_parameter(
        "head", tied ? embed->weight : torch::randn({vocabulary, width}) * 0.1);
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embed(tokens);
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return torch::linear(x, head);
  }

  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  at::Tensor head;
};
TORCH_MODULE(Stack);

} // namespace tessera::testing
