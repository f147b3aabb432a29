// Everything that the trainer needs from Tessera to share a model among ranks.
#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "language_model.h"
#include "settings.h"

namespace gpt {

/// A model with its optimizer, shared among the ranks as --strategy says. What
/// differs between the strategies is here; the training loop is the same for
/// all.
class Parallel {
 public:
  /// The model is the same on every rank. Collective.
  Parallel(
      const Settings& settings,
      std::unique_ptr<LanguageModel> model,
      torch::Device device);

  LanguageModel& model() {
    return *model_;
  }
  torch::nn::Module& module() {
    return *module_;
  }
  torch::optim::Optimizer& optimizer() {
    return *optimizer_;
  }
  int64_t num_parameters() const {
    return num_parameters_;
  }

  /// Forward of a batch on the device, in the precision of the settings.
  torch::Tensor loss(const tessera::data::TokenBatch& batch);

  /// Takes the model's values from a safetensors file, a folder of them, or a
  /// checkpoint. Of a tied parameter one name is enough. Throws UsageError if
  /// it has none. Collective.
  void load_weights(const std::filesystem::path& path);

  /// Makes steps of the backwards of several losses. Collective.
  tessera::GradientAccumulation accumulation(
      const tessera::GradientAccumulationOptions& options);

 private:
  /// Copies of a model whose class is not known here.
  struct Copies : tessera::DistributedDataParallel<torch::nn::Module> {
    using DistributedDataParallel::before_forward;
    using DistributedDataParallel::DistributedDataParallel;
  };

  void shard(const Settings& settings);
  void make_optimizer(const Settings& settings);

  const Strategy strategy_;
  const std::optional<torch::ScalarType> half_; // to compute in; else fp32
  const std::unique_ptr<LanguageModel> model_;
  const std::shared_ptr<torch::nn::Module> module_; // of it
  int64_t num_parameters_ = 0;
  std::unique_ptr<Copies> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

} // namespace gpt
