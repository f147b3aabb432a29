// Everything that the trainer needs from Tessera to share a model among ranks.
#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <memory>
#include <optional>

#include "model.h"
#include "settings.h"

namespace gpt {

/// A model with its optimizer, shared among the ranks as --strategy says. What
/// differs between the strategies is here; the training loop is the same for
/// all.
class Parallel {
 public:
  /// Makes the model, the same on every rank. Collective.
  Parallel(const Settings& settings, int64_t vocabulary, torch::Device device);

  Gpt& model() {
    return model_;
  }
  torch::optim::Optimizer& optimizer() {
    return *optimizer_;
  }
  int64_t num_parameters() const {
    return num_parameters_;
  }

  /// Forward of a batch on the device, in the precision of the settings.
  torch::Tensor loss(const tessera::data::TokenBatch& batch);

  /// Makes steps of the backwards of several losses. Collective.
  tessera::GradientAccumulation accumulation(
      const tessera::GradientAccumulationOptions& options);

 private:
  void shard(const Settings& settings);
  void make_optimizer(const Settings& settings);

  const Strategy strategy_;
  const std::optional<torch::ScalarType> half_; // to compute in; else fp32
  Gpt model_{nullptr};
  int64_t num_parameters_ = 0;
  std::unique_ptr<tessera::DistributedDataParallel<GptImpl>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

} // namespace gpt
