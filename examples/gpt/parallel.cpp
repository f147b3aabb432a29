#include "parallel.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autocast.h"

namespace gpt {
namespace {

using tessera::optim::AdamW;
using tessera::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

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

using Names = std::vector<std::string>;

/// The names of each parameter that has several.
std::vector<Names> tied_names(const torch::nn::Module& module) {
  std::map<const c10::TensorImpl*, Names> names;
  for (const auto& item : module.named_parameters()) {
    names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  }
  std::vector<Names> tied;
  for (const auto& [parameter, all] : names) {
    if (all.size() > 1) {
      tied.push_back(all);
    }
  }
  return tied;
}

} // namespace

Parallel::Parallel(
    const Settings& settings,
    std::unique_ptr<LanguageModel> model,
    torch::Device device)
    : strategy_(settings.strategy),
      half_(half_of(settings.precision)),
      model_(std::move(model)),
      module_(model_->module()) {
  module_->to(device);
  num_parameters_ = count_parameters(*module_);
  if (settings.recompute) {
    model_->recompute_blocks();
  }
  if (strategy_ == Strategy::Fsdp) {
    shard(settings);
  } else {
    ddp_ = std::make_unique<Copies>(
        module_, tessera::DDPOptions().gradient_as_bucket_view(true));
  }
  make_optimizer(settings);
}

/// One unit per block, gathered when it computes and freed afterwards, and one
/// for the rest: the embeddings and the last norm.
void Parallel::shard(const Settings& settings) {
  auto options = tessera::FullyShardOptions()
                     .policy(model_->block_policy())
                     .reshard_after_forward(!settings.keep_gathered);
  if (half_) {
    options.mp_policy(
        tessera::MixedPrecisionPolicy().param_dtype(*half_).reduce_dtype(
            torch::kFloat));
  }
  if (settings.offload) {
    options.offload_policy(tessera::CPUOffloadPolicy());
  }
  tessera::fully_shard(module_, options);
}

void Parallel::make_optimizer(const Settings& settings) {
  // Matrices decay, biases and norms do not. The module's own parameters have
  // their shapes even if this rank has only a shard.
  std::vector<torch::Tensor> decayed;
  std::vector<torch::Tensor> kept;
  std::unordered_set<const c10::TensorImpl*> seen; // tied ones count once
  const auto all = tessera::parameters(module_);
  auto own = all.begin();
  for (const auto& whole : module_->parameters()) {
    if (seen.insert(whole.unsafeGetTensorImpl()).second) {
      (whole.dim() >= 2 ? decayed : kept).push_back(*own++);
    }
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
  if (ddp_) {
    ddp_->before_forward(); // which sends buffers
  }
  return model_->loss(batch);
}

void Parallel::load_weights(const std::filesystem::path& path) {
  const auto tied = tied_names(*module_);
  const auto names_of = [&](const std::string& name) -> const Names* {
    for (const Names& names : tied) {
      if (std::find(names.begin(), names.end(), name) != names.end()) {
        return &names;
      }
    }
    return nullptr;
  };
  auto state = tessera::get_model_state_dict(module_);
  const auto report = tessera::checkpoint::load(
      state,
      path,
      tessera::checkpoint::LoadOptions().optional(
          [&](const std::string& name) { return names_of(name) != nullptr; }));
  std::map<const Names*, size_t> num_missing;
  for (const std::string& name : report.missing) {
    const Names* names = names_of(name);
    if (names != nullptr && ++num_missing[names] == names->size()) {
      throw UsageError(
          "--weights \"" + path.string() + "\" has no \"" + names->front() +
          "\", nor another name of this tied parameter. Give all weights of "
          "the model.");
    }
  }
}

tessera::GradientAccumulation Parallel::accumulation(
    const tessera::GradientAccumulationOptions& options) {
  using tessera::GradientAccumulation;
  return ddp_ ? GradientAccumulation(*ddp_, {*optimizer_}, options)
              : GradientAccumulation(module_, {*optimizer_}, options);
}

} // namespace gpt
