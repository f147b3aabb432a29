// What deferred construction and its replay cost.
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "deferred/support.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture
using tessera::testing::MemoryMeter;

/// How often uniform_ was called.
std::atomic<int> num_draws = 0;

TEST_F(DeferredInitTest, AHugeLayerIsBuiltWithoutMemory) {
  torch::nn::Linear huge{nullptr};
  {
    const DeferredInit deferred;
    huge = torch::nn::Linear(200000, 200000);
    huge->to(torch::kBFloat16);
  }
  EXPECT_EQ(huge->weight.numel(), 40'000'000'000);
  EXPECT_TRUE(is_deferred(huge->weight));
}

TEST_F(DeferredInitTest, ReplayPeaksBelowOneParameter) {
  static constexpr int kLayers = 8;
  static constexpr int64_t kSize = 1024;
  constexpr size_t kParamBytes = kSize * kSize * sizeof(float);
  constexpr size_t kSlackBytes = kParamBytes / 2;
  const Make make = [] {
    torch::nn::Sequential model;
    for (int i = 0; i < kLayers; ++i) {
      model->push_back(torch::nn::Linear(kSize, kSize));
    }
    for (const auto& parameter : model->parameters()) {
      torch::nn::init::normal_(parameter);
    }
    return model.ptr();
  };
  for (const bool reverse : {false, true}) {
    const MemoryMeter meter;
    const auto module = make_deferred(make);
    EXPECT_LT(meter.peak_bytes(), kSlackBytes);
    auto parameters = module->parameters();
    if (reverse) {
      std::reverse(parameters.begin(), parameters.end());
    }
    for (const auto& parameter : parameters) {
      replay(parameter);
    }
    EXPECT_GE(meter.peak_bytes(), kParamBytes);
    EXPECT_LT(meter.peak_bytes(), kParamBytes + kSlackBytes);
  }
}

TEST_F(DeferredInitTest, ReplayFreesWhatItNoLongerNeeds) {
  constexpr int64_t kNumel = 1 << 18;
  constexpr size_t kBytes = kNumel * sizeof(float);
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::rand({kNumel});
    for (int i = 0; i < 10; ++i) {
      tensor = tensor * 0.5;
    }
    const auto unused = torch::rand({100 * kNumel});
  }
  const MemoryMeter meter;
  replay(tensor);
  EXPECT_LT(meter.peak_bytes(), 2 * kBytes + kBytes / 2);
}

TEST_F(DeferredInitTest, ReplayIssuesExactlyTheDrawsItNeeds) {
  constexpr int kLayers = 50;
  constexpr int kDraws = 2 * kLayers; // a weight and a bias each
  const auto counter = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function)
          -> std::unique_ptr<at::ObserverContext> {
        num_draws += std::string_view(function.name()) == "aten::uniform_";
        return nullptr;
      }));
  for (const bool reverse : {false, true}) {
    const auto module = make_deferred([] {
      torch::nn::Sequential model;
      for (int i = 0; i < kLayers; ++i) {
        model->push_back(torch::nn::Linear(4, 4));
      }
      return model.ptr();
    });
    auto parameters = module->parameters();
    if (reverse) {
      std::reverse(parameters.begin(), parameters.end());
    }
    num_draws = 0;
    for (const auto& parameter : parameters) {
      replay(parameter);
    }
    // In reverse, the first one needs all before it, which are not kept.
    EXPECT_EQ(num_draws, reverse ? 2 * kDraws - 1 : kDraws);
  }
  at::Tensor twice;
  {
    const DeferredInit deferred;
    twice = torch::empty({4}).uniform_().uniform_();
  }
  num_draws = 0;
  replay(twice);
  EXPECT_EQ(num_draws, 2);
  at::removeCallback(counter);
}

} // namespace
} // namespace tessera
