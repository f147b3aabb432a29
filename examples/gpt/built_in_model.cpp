#include "built_in_model.h"

#include "flops.h"

namespace gpt {

/// Sharded models are built without memory, however large they are; sharding
/// gives them values, one parameter at a time. The numbers are the same either
/// way.
BuiltInModel::BuiltInModel(const Settings& settings, int64_t vocabulary)
    : chunks_loss_(settings.chunked_loss), vocabulary_(vocabulary) {
  torch::manual_seed(settings.seed);
  std::optional<tessera::DeferredInit> deferred;
  if (settings.strategy == Strategy::Fsdp) {
    deferred.emplace();
  }
  GptConfig config = settings.model;
  config.vocabulary = vocabulary;
  gpt_ = Gpt(config);
  flops_per_token_ = gpt::flops_per_token(config, count_parameters(*gpt_));
}

torch::Tensor BuiltInModel::loss(const tessera::data::TokenBatch& batch) {
  if (!chunks_loss_) {
    return LanguageModel::loss(batch);
  }
  return tessera::linear_cross_entropy(
      gpt_->hidden(batch.inputs), gpt_->tokens->weight, batch.targets);
}

} // namespace gpt
