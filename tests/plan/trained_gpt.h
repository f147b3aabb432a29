// The GPT that plans are compared with: of the shape of examples/gpt, small
// enough for a test.
#pragma once

#include <tessera/fsdp/recompute.h>

#include <torch/torch.h>

#include <vector>

#include "plan/plan.h"

namespace tessera::testing {

struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(const plan::GptShape& shape) : heads(shape.heads) {
    using torch::nn::LayerNorm;
    using torch::nn::LayerNormOptions;
    using torch::nn::Linear;
    const int64_t width = shape.width;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
    qkv = register_module("qkv", Linear(width, 3 * width));
    out = register_module("out", Linear(width, width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }

  at::Tensor forward(at::Tensor x) {
    const auto parts = qkv(norm1(x))
                           .unflatten(-1, {3, heads, -1})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto attended = torch::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attended.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x)), "tanh"));
  }

  int64_t heads;
  torch::nn::LayerNorm norm1{nullptr};
  torch::nn::LayerNorm norm2{nullptr};
  torch::nn::Linear qkv{nullptr};
  torch::nn::Linear out{nullptr};
  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};
TORCH_MODULE(GptBlock);

struct TrainedGptImpl : torch::nn::Module {
  explicit TrainedGptImpl(const plan::GptSubject& subject)
      : shape(subject.shape), run(subject.run) {
    using torch::nn::Embedding;
    tokens =
        register_module("tokens", Embedding(shape.vocabulary, shape.width));
    positions =
        register_module("positions", Embedding(shape.length, shape.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < shape.layers; ++i) {
      blocks->push_back(GptBlock(shape));
    }
    norm = register_module(
        "norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
    if (!shape.is_tied) {
      head = register_module(
          "head",
          torch::nn::Linear(
              torch::nn::LinearOptions(shape.width, shape.vocabulary)
                  .bias(false)));
    }
  }

  at::Tensor forward(const at::Tensor& ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1)));
    for (const auto& module : *blocks) {
      const auto block = std::dynamic_pointer_cast<GptBlockImpl>(module);
      x = run.recomputes
          ? recompute(
                [block](const at::Tensor& y) { return block->forward(y); }, x)
          : block->forward(x);
    }
    return torch::linear(norm(x), head ? head->weight : tokens->weight);
  }

  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) {
    const auto logits = forward(ids);
    return torch::cross_entropy_loss(
        (run.loss_dtype ? logits.to(torch::kFloat) : logits).flatten(0, 1),
        targets.flatten());
  }

  const plan::GptShape shape;
  const plan::GptRun run;
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Embedding positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TrainedGpt);

} // namespace tessera::testing
