#include "fsdp/training.h"

#include <algorithm>
#include <utility>

#include "support/device.h"

namespace tessera::testing {

Stack make_stack(bool tied) {
  torch::manual_seed(3);
  Stack model(kVocabulary, kWidth, kDepth, tied);
  model->to(at::kDouble);
  model->to(test_device());
  return model;
}

at::Tensor tokens(int rank, int step) {
  torch::manual_seed(1000 + 10 * step + rank);
  return torch::randint(0, kVocabulary, {kBatch, 5}, torch::kLong)
      .to(test_device());
}

at::Tensor all_tokens(int size, int step) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(tokens(rank, step));
  }
  return torch::cat(parts);
}

at::Tensor loss_of(Stack& model, const at::Tensor& x) {
  const auto logits = model->forward(x);
  return torch::cross_entropy_loss(
      logits.view({-1, kVocabulary}), x.roll(1, 1).reshape({-1}));
}

void shard_blocks(Stack& model, const FullyShardOptions& options) {
  for (const auto& block : *model->blocks) {
    fully_shard(*block, options);
  }
  fully_shard(*model, options);
}

FSDPOptions by_block() {
  return FSDPOptions().auto_wrap_policy(module_wrap_policy<Block>());
}

torch::optim::AdamW make_adamw(std::vector<at::Tensor> parameters) {
  return torch::optim::AdamW(
      std::move(parameters), torch::optim::AdamWOptions(1e-2));
}

Reference train_plain(int size, bool tied) {
  Reference reference{make_stack(tied)};
  auto parameters =
      tied ? std::vector<at::Tensor>() : reference.model->parameters();
  if (tied) { // LibTorch lists a tied parameter twice
    for (auto& p : reference.model->parameters()) {
      if (std::none_of(parameters.begin(), parameters.end(), [&](auto& q) {
            return q.is_same(p);
          })) {
        parameters.push_back(p);
      }
    }
  }
  auto optimizer = make_adamw(parameters);
  for (int step = 0; step < kSteps; ++step) {
    auto loss = loss_of(reference.model, all_tokens(size, step));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    reference.losses.push_back(loss.item<double>());
  }
  return reference;
}

void expect_same_parameters(Stack& sharded, Stack& plain, double tolerance) {
  torch::NoGradGuard no_grad;
  const auto theirs = plain->named_parameters();
  for (const auto& item : sharded->named_parameters()) {
    const double difference =
        (item.value() - theirs[item.key()]).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << item.key();
  }
}

std::vector<double> train_sharded(Stack& model, int rank) {
  auto optimizer = make_adamw(parameters(*model));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    auto loss = loss_of(model, tokens(rank, step));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

} // namespace tessera::testing
