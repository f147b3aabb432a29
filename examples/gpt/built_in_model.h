#pragma once

#include <memory>
#include <optional>
#include <string>

#include "language_model.h"
#include "model.h"

namespace gpt {

/// The GPT of model.h.
class BuiltInModel : public LanguageModel {
 public:
  BuiltInModel(const Settings& settings, int64_t vocabulary);

  std::shared_ptr<torch::nn::Module> module() override {
    return gpt_.ptr();
  }
  torch::Tensor logits(const torch::Tensor& ids) override {
    return gpt_->forward(ids);
  }
  torch::Tensor loss(const tessera::data::TokenBatch& batch) override;
  tessera::WrapPolicy block_policy() override {
    return tessera::module_wrap_policy<Block>();
  }
  void recompute_blocks() override {
    tessera::apply_activation_checkpointing<Block>(gpt_);
  }
  int64_t vocabulary() const override {
    return vocabulary_;
  }
  std::string description() const override {
    return "GPT";
  }
  std::optional<double> flops_per_token() override {
    return flops_per_token_;
  }

 private:
  const bool chunks_loss_; // logits are never held as a whole
  const int64_t vocabulary_;
  Gpt gpt_{nullptr};
  double flops_per_token_ = 0;
};

} // namespace gpt
