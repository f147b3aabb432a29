#include "parallel.h"

#include <utility>
#include <vector>

#include "autocast.h"

namespace gpt {
namespace {

using tessera::optim::AdamW;
using tessera::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

/// Sharded models are built without memory, however large they are; sharding
/// gives them values, one parameter at a time. The numbers are the same either
/// way.
Gpt make_model(const GptConfig& config, const Settings& settings) {
  torch::manual_seed(settings.seed);
  std::optional<tessera::DeferredInit> deferred;
  if (settings.strategy == Strategy::Fsdp) {
    deferred.emplace();
  }
  return Gpt(config);
}

std::optional<torch::ScalarType> half_of(Precision precision) {
  switch (precision) {
    case Precision::Float32:
      return std::nullopt;
    case Precision::BFloat16:
      return torch::kBFloat16;
    case Precision::Float16:
      return torch::kHalf;
  }
  return std::nullopt;
}

} // namespace

Parallel::Parallel(
    const Settings& settings,
    int64_t vocabulary,
    torch::Device device)
    : strategy_(settings.strategy), half_(half_of(settings.precision)) {
  GptConfig config = settings.model;
  config.vocabulary = vocabulary;
  model_ = make_model(config, settings);
  model_->to(device);
  for (const auto& parameter : model_->parameters()) {
    num_parameters_ += parameter.numel();
  }
  if (settings.recompute) {
    tessera::apply_activation_checkpointing<Block>(model_);
  }
  if (strategy_ == Strategy::Fsdp) {
    shard(settings);
  } else {
    ddp_ = std::make_unique<tessera::DistributedDataParallel<GptImpl>>(
        model_, tessera::DDPOptions().gradient_as_bucket_view(true));
  }
  make_optimizer(settings);
}

/// One unit per block, gathered when it computes and freed afterwards, and one
/// for the rest: the embeddings and the last norm.
void Parallel::shard(const Settings& settings) {
  auto options = tessera::FullyShardOptions()
                     .policy(tessera::module_wrap_policy<Block>())
                     .reshard_after_forward(!settings.keep_gathered);
  if (half_) {
    options.mp_policy(
        tessera::MixedPrecisionPolicy().param_dtype(*half_).reduce_dtype(
            torch::kFloat));
  }
  if (settings.offload) {
    options.offload_policy(tessera::CPUOffloadPolicy());
  }
  tessera::fully_shard(model_, options);
}

void Parallel::make_optimizer(const Settings& settings) {
  // Matrices decay, biases and norms do not. The module's own parameters have
  // their shapes even if this rank has only a shard.
  std::vector<torch::Tensor> decayed;
  std::vector<torch::Tensor> kept;
  const auto whole = model_->parameters();
  const auto own = tessera::parameters(model_);
  for (size_t i = 0; i < whole.size(); ++i) {
    (whole[i].dim() >= 2 ? decayed : kept).push_back(own[i]);
  }
  const auto options = AdamWOptions(settings.lr).betas({0.9, 0.95});
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      decayed,
      std::make_unique<AdamWOptions>(
          AdamWOptions(options).weight_decay(settings.weight_decay)));
  groups.emplace_back(
      kept,
      std::make_unique<AdamWOptions>(AdamWOptions(options).weight_decay(0)));
  if (strategy_ == Strategy::Zero) {
    optimizer_ = std::make_unique<tessera::ZeroRedundancyOptimizer>(
        groups, tessera::optimizer_class<AdamW>(options));
  } else {
    optimizer_ = std::make_unique<AdamW>(groups, options);
  }
}

torch::Tensor Parallel::loss(const tessera::data::TokenBatch& batch) {
  // Sharded parameters are gathered in the precision to compute in; LibTorch
  // casts whole parameters.
  std::optional<Autocast> autocast;
  if (half_ && strategy_ != Strategy::Fsdp) {
    autocast.emplace(batch.inputs.device().type(), *half_);
  }
  return loss_of(model_, batch.inputs, batch.targets);
}

tessera::GradientAccumulation Parallel::accumulation(
    const tessera::GradientAccumulationOptions& options) {
  using tessera::GradientAccumulation;
  return ddp_ ? GradientAccumulation(*ddp_, {*optimizer_}, options)
              : GradientAccumulation(model_, {*optimizer_}, options);
}

} // namespace gpt
