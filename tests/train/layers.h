// A model whose sizes are easy to add up.
#pragma once

#include <tessera/fsdp/fully_shard.h>
#include <tessera/train/monitor.h>

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::testing {

/// Square layers without bias, and a small head.
struct Layers : torch::nn::Module {
  static constexpr int64_t kSize = 256;
  static constexpr int kCount = 4;
  static constexpr int64_t kHead = 8;
  static constexpr int64_t kLayerBytes = kSize * kSize * 4;
  static constexpr int64_t kHeadBytes = kSize * kHead * 4;
  static constexpr int64_t kBytes = kCount * kLayerBytes + kHeadBytes;

  Layers() {
    for (int i = 0; i < kCount; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          torch::nn::Linear(
              torch::nn::LinearOptions(kSize, kSize).bias(false))));
    }
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(kSize, kHead).bias(false)));
  }

  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::relu(layer(x));
    }
    return head(x);
  }

  /// Each layer a unit, the head in the root's.
  void shard() {
    for (auto& layer : layers) {
      fully_shard(*layer);
    }
    fully_shard(*this);
  }

  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
};

/// The unit of the root is named after its class.
inline constexpr const char* kRootName = "tessera::testing::Layers";

inline std::shared_ptr<Layers> make_layers() {
  torch::manual_seed(5);
  return std::make_shared<Layers>();
}

/// Trains with a monitor and returns the report of the last step.
template <class Optimizer>
StepReport watch(
    Layers& model,
    Optimizer& optimizer,
    const at::Tensor& x,
    int steps,
    bool timeline) {
  StepMonitor monitor(model, {optimizer});
  StepReport report;
  for (int step = 0; step < steps; ++step) {
    monitor.begin_step(MonitorOptions().timeline(timeline));
    optimizer.zero_grad();
    model.forward(x).square().mean().backward();
    optimizer.step();
    report = monitor.end_step();
  }
  return report;
}

} // namespace tessera::testing
