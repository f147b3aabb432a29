// What the trainer needs of a model. There are two kinds: the built-in GPT
// (built_in_model.h), and models that were written in Python
// (exported_model.h).
#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "corpus.h"
#include "settings.h"

namespace gpt {

/// A causal language model: from tokens to the logits of those that follow.
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  /// The module that is shared among the ranks, trained and saved.
  virtual std::shared_ptr<torch::nn::Module> module() = 0;

  /// From tokens, (rows, length) int64, to (rows, length, vocabulary).
  virtual torch::Tensor logits(const torch::Tensor& ids) = 0;
  /// How surprised the model is by the targets: the mean over all tokens.
  virtual torch::Tensor loss(const tessera::data::TokenBatch& batch) {
    const auto found = logits(batch.inputs).to(torch::kFloat);
    return torch::cross_entropy_loss(
        found.flatten(0, 1), batch.targets.flatten());
  }

  /// Chooses the model's repeated blocks, which become units.
  virtual tessera::WrapPolicy block_policy() = 0;
  /// Makes backward compute the activations of these blocks again. Throws
  /// UsageError if that cannot be.
  virtual void recompute_blocks() = 0;

  /// Tokens that it knows are below this.
  virtual int64_t vocabulary() const = 0;

  /// What it is, for people: "GPT".
  virtual std::string description() const = 0;
  /// Operations for a token of training; nothing if that is not known.
  virtual std::optional<double> flops_per_token() = 0;
};

/// The number of parameters of a module; tied ones count once.
int64_t count_parameters(const torch::nn::Module& module);

/// Makes the model that the settings describe, for the tokens of a corpus, the
/// same on every rank. Sharded models have no values yet. Chooses
/// settings.model.length if that is 0: the longest window that an exported
/// model takes. Throws UsageError if model, settings and corpus do not fit
/// together. Collective.
std::unique_ptr<LanguageModel> make_model(
    Settings& settings,
    const Corpus& corpus);

} // namespace gpt
