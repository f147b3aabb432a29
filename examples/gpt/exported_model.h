#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "language_model.h"
#include "model_form.h"

namespace gpt {

/// A causal language model that was written in Python: --model.
class ExportedModel : public LanguageModel {
 public:
  /// As make_model() says.
  ExportedModel(Settings& settings, const Corpus& corpus);

  std::shared_ptr<torch::nn::Module> module() override {
    return model_.ptr();
  }
  /// Rows and tokens that the model was not exported for are filled up: it is
  /// causal, so what follows changes nothing.
  torch::Tensor logits(const torch::Tensor& ids) override;
  /// The model's own loss, if --model-output says so or the model returns
  /// nothing else; evaluations take the logits if there are some.
  torch::Tensor loss(const tessera::data::TokenBatch& batch) override;
  tessera::WrapPolicy block_policy() override {
    return tessera::block_policy(model_);
  }
  void recompute_blocks() override;
  /// That of the logits; 0 if there are none.
  int64_t vocabulary() const override;
  std::string description() const override;
  /// Not known: the file does not tell what is multiplied with what.
  std::optional<double> flops_per_token() override {
    return std::nullopt;
  }

 private:
  void load(const Settings& settings);
  void check_precision(const Settings& settings);
  void check_modes(const Settings& settings);
  void keep_parameters_in_float();
  void check_results(const Settings& settings, const Corpus& corpus) const;
  void check_sizes(Settings& settings) const;
  void check_evaluation(const Settings& settings, const Corpus& corpus) const;
  [[noreturn]] void refuse(const std::string& why) const;

  tessera::Exported model_{nullptr};
  std::string file_;
  ModelForm form_;
};

} // namespace gpt
