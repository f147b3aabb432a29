// Peak memory as arithmetic: what a step may hold at most, in units' sizes.
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>

#include "fsdp/training.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

constexpr int64_t kSize = 384; // of a square layer
constexpr int kLayers = 6;
constexpr double kLayerBytes = kSize * kSize * 4.0;
constexpr double kRootBytes = 8.0 * kSize * 4;
constexpr double kSlack = 1.05;

/// Square layers without bias, each a unit, and a small head in the root.
struct Layers : torch::nn::Module {
  Layers() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          torch::nn::Linear(
              torch::nn::LinearOptions(kSize, kSize).bias(false))));
    }
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(kSize, 8).bias(false)));
  }

  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::relu(layer(x));
    }
    return head(x);
  }

  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
};

struct Peaks {
  double rest = 0; // between steps, with gradients cleared
  double forward = 0;
  double backward = 0;
};

/// Measured in the third step, when buffers are recycled and gathers run ahead.
Peaks measure(int size, const FullyShardOptions& options, double* model_bytes) {
  MemoryMeter meter;
  auto model = std::make_shared<Layers>();
  for (auto& layer : model->layers) {
    fully_shard(*layer, options);
  }
  fully_shard(*model, options);
  *model_bytes = kLayers * kLayerBytes + kRootBytes;
  EXPECT_LE(
      static_cast<double>(meter.live_bytes()), kSlack * *model_bytes / size);
  Peaks peaks;
  const auto x = torch::ones({1, kSize});
  for (int step = 0; step < 3; ++step) {
    for (const auto& leaf : parameters(*model)) {
      leaf.mutable_grad().reset();
    }
    peaks.rest = static_cast<double>(meter.live_bytes());
    meter.reset_peak();
    const at::Tensor loss = model->forward(x).sum();
    peaks.forward = static_cast<double>(meter.peak_bytes());
    meter.reset_peak();
    loss.backward();
    peaks.backward = static_cast<double>(meter.peak_bytes());
  }
  return peaks;
}

class PeakMemoryTest
    : public ::testing::TestWithParam<std::tuple<int, ShardLayout>> {};

TEST_P(PeakMemoryTest, PeaksBelowShardsRootTwoUnitsAndTwoGradients) {
  const auto [size, layout] = GetParam();
  on_ranks(size, [size = size, layout = layout](const Group&) {
    double model = 0;
    const Peaks peaks =
        measure(size, FullyShardOptions().layout(layout), &model);
    const double shards = model / size;
    // Buffers that wait in the pool are part of what is held.
    const double forward = shards + kRootBytes + 2 * kLayerBytes;
    EXPECT_LE(peaks.forward, kSlack * forward);
    const double backward = forward + shards + 2 * kLayerBytes;
    EXPECT_LE(peaks.backward, kSlack * backward);
    if (size == 1) { // nothing is gathered: parameters and their gradients
      EXPECT_LE(peaks.forward, kSlack * model);
      EXPECT_LE(peaks.backward, kSlack * (2 * model + kLayerBytes));
    }
  });
}

TEST_P(PeakMemoryTest, KeepingParametersCostsTheWholeModel) {
  const auto [size, layout] = GetParam();
  on_ranks(size, [size = size, layout = layout](const Group&) {
    double model = 0;
    const Peaks peaks = measure(
        size,
        FullyShardOptions().layout(layout).reshard_after_forward(false),
        &model);
    const double full = size == 1 ? 0 : model;
    const double gathered = layout == ShardLayout::Dim0 ? kLayerBytes : 0;
    EXPECT_LE(peaks.forward, kSlack * (model / size + full + gathered));
    EXPECT_GE(peaks.forward, model / size + full); // the test can fail
  });
}

TEST_P(PeakMemoryTest, MemoryForOverlapComesOnTop) {
  const auto [size, layout] = GetParam();
  on_ranks(size, [size = size, layout = layout](const Group&) {
    constexpr int64_t kOverlap = 2; // layers
    double model = 0;
    const Peaks peaks = measure(
        size,
        FullyShardOptions().layout(layout).overlap_bytes(
            kOverlap * static_cast<int64_t>(kLayerBytes)),
        &model);
    const double shards = model / size;
    const double forward = shards + kRootBytes + (2 + kOverlap) * kLayerBytes;
    EXPECT_LE(peaks.forward, kSlack * forward);
    // As much for reductions.
    EXPECT_LE(
        peaks.backward,
        kSlack * (forward + shards + (2 + kOverlap) * kLayerBytes));
    if (size > 1) { // it is used
      EXPECT_GE(peaks.forward, shards + (1 + kOverlap) * kLayerBytes);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    PeakMemoryTest,
    ::testing::Combine(
        ::testing::Values(1, 2, 4),
        ::testing::Values(ShardLayout::Flat, ShardLayout::Dim0)),
    [](const auto& test) {
      return std::to_string(std::get<0>(test.param)) +
          (std::get<1>(test.param) == ShardLayout::Flat ? "Flat" : "Dim0");
    });

} // namespace
} // namespace tessera
