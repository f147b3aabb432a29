// The GPT that plans are compared with: the blocks of examples/gpt, and what
// plans know beyond it (an output layer of its own, a loss in the dtype of the
// logits).
#pragma once

#include <tessera/nn/linear_cross_entropy.h>
#include <tessera/recompute/recompute.h>

#include <torch/torch.h>

#include <vector>

#include "gpt/model.h"
#include "plan/plan.h"

namespace tessera::testing {

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
      blocks->push_back(gpt::Block(
          gpt::GptConfig{.heads = shape.heads, .width = shape.width}));
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

  at::Tensor hidden(const at::Tensor& ids) {
    auto x = tokens(ids); // first: backward comes to it last
    x = x + positions(torch::arange(ids.size(1)));
    for (const auto& module : *blocks) {
      const auto block = std::dynamic_pointer_cast<gpt::BlockImpl>(module);
      x = run.recomputes
          ? recompute(
                [block](const at::Tensor& y) { return block->forward(y); }, x)
          : block->forward(x);
    }
    return norm(x);
  }

  at::Tensor forward(const at::Tensor& ids) {
    return torch::linear(hidden(ids), head ? head->weight : tokens->weight);
  }

  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) {
    if (run.chunks_loss) {
      return linear_cross_entropy(
          hidden(ids), head ? head->weight : tokens->weight, targets);
    }
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
