// Which GPT to train, and on which device: the first two words of step_bench
// and ddp_bench.
#pragma once

#include <tessera/nn/linear_cross_entropy.h>

#include <torch/torch.h>

#include <map>
#include <stdexcept>
#include <string>

#include "gpt.h"
#include "harness.h"

namespace bench {

/// Waits for the GPU if the model is on one.
inline void synchronize(const torch::Device& device) {
  if (device.is_cuda()) {
    torch::cuda::synchronize();
  }
}

struct Setting {
  explicit Setting(const Arguments& arguments)
      : Setting(arguments.word(0, "tiny"), arguments.word(1, "cpu")) {}
  Setting(const std::string& size, const torch::Device& where)
      : name(size), device(where) {
    const std::map<std::string, GptConfig> configs{
        {"tiny", {}},
        {"124M", {50304, 768, 12, 12, 1024, 8}},
        {"774M", {50304, 1280, 20, 36, 1024, 8}}};
    const auto found = configs.find(name);
    if (found == configs.end()) {
      throw std::invalid_argument("there is no GPT of size " + name);
    }
    config = found->second;
  }

  bool is_cuda() const {
    return device.is_cuda();
  }

  /// The end of a row's name: "gpt-tiny/cpu2".
  std::string place(const tessera::Group& world) const {
    return "gpt-" + name + (is_cuda() ? "/cuda" : "/cpu") +
        std::to_string(world.size());
  }

  /// Tokens to learn: (batch, length).
  torch::Tensor make_ids() const {
    return torch::randint(
               0,
               config.vocabulary,
               {config.batch, config.length},
               torch::kLong)
        .to(device);
  }

  std::string name;
  torch::Device device;
  GptConfig config;
};

/// The loss of predicting each token from the tokens up to it. Where the
/// vocabulary is large, its logits are never held; peers/gpt.py does the same.
inline torch::Tensor loss_of(Gpt& model, const torch::Tensor& ids) {
  constexpr int64_t kLargeVocabulary = 1000;
  if (model->head->weight.size(0) >= kLargeVocabulary) {
    return tessera::linear_cross_entropy(
        model->hidden(ids), model->head->weight, ids);
  }
  const auto logits = model->forward(ids);
  return torch::cross_entropy_loss(
      logits.view({-1, logits.size(-1)}).to(torch::kFloat), ids.view({-1}));
}

} // namespace bench
