// Deferred modules after the guard, around it and on other threads.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "deferred/support.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture
using deferred::intended_device;
using ::testing::HasSubstr;

TEST_F(DeferredInitTest, InitialisationAfterTheGuardIsRecorded) {
  const auto finish = [](Module& module) {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : module.parameters()) {
      torch::nn::init::normal_(parameter, 0, 0.02);
      parameter.mul_(2);
    }
    module.to(torch::kDouble);
  };
  const Make make = [] {
    return torch::nn::Sequential(
               torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6))
        .ptr();
  };
  const auto plain = make_plain(make);
  finish(*plain);
  const auto module = make_deferred(make);
  std::thread([&] { finish(*module); }).join();
  EXPECT_EQ(num_deferred(*module), 6);
  materialize(*module);
  const Named expected = tensors_of(*plain);
  const Named tensors = tensors_of(*module);
  for (size_t i = 0; i < tensors.size(); ++i) {
    expect_same(tensors[i].first, tensors[i].second, expected[i].second);
  }
}

TEST_F(DeferredInitTest, MovingToADeviceAfterTheGuardIsRecorded) {
  const auto module =
      make_deferred([] { return torch::nn::Linear(3, 4).ptr(); });
  module->to(torch::kCPU);
  EXPECT_EQ(num_deferred(*module), 2);
  EXPECT_EQ(intended_device(module->parameters()[0]), at::Device(at::kCPU));
  if (!torch::cuda::is_available()) {
    EXPECT_THAT(
        error_of([&] { module->to(torch::kCUDA); }),
        HasSubstr("asks for device cuda, but this process has no device"));
  }
}

TEST_F(DeferredInitTest, GuardsNest) {
  at::Tensor outer;
  at::Tensor inner;
  {
    const DeferredInit first;
    {
      const DeferredInit second;
      inner = torch::rand({2});
    }
    outer = torch::rand({2});
  }
  EXPECT_TRUE(is_deferred(inner));
  EXPECT_TRUE(is_deferred(outer));
  EXPECT_FALSE(is_deferred(torch::rand({2})));
  EXPECT_FALSE(is_deferred(torch::empty({2}, torch::kMeta)));
  EXPECT_FALSE(is_deferred(at::Tensor()));
}

TEST_F(DeferredInitTest, OtherThreadsAreLeftAlone) {
  const DeferredInit deferred;
  std::thread([] { EXPECT_FALSE(is_deferred(torch::rand({2}))); }).join();
}

TEST_F(DeferredInitTest, ReplayUnderTheGuardInferenceModeAndAutocast) {
  const auto plain = make_plain([] { return torch::nn::Linear(64, 64).ptr(); });
  torch::manual_seed(kSeed);
  const DeferredInit deferred;
  torch::nn::Linear linear(64, 64);
  const auto product = [&] {
    const torch::NoGradGuard no_grad;
    return linear->weight.matmul(linear->weight);
  }();
  at::Tensor values;
  {
    const c10::InferenceMode inference;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    values = replay(product);
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  EXPECT_FALSE(is_deferred(values));
  EXPECT_FALSE(values.is_inference());
  const auto weight = plain->parameters()[0].detach();
  c10::impl::ExcludeDispatchKeyGuard off(deferred::kDeferredKey);
  EXPECT_TRUE(at::equal(values, weight.matmul(weight)));
}

TEST_F(DeferredInitTest, MetaTensorsThatAreMeantStayMeta) {
  const DeferredInit deferred;
  const auto meta = torch::rand({2}, torch::kMeta);
  EXPECT_TRUE(meta.is_meta());
  EXPECT_FALSE(is_deferred(meta));
}

TEST_F(DeferredInitTest, PinnedMemoryIsNotAskedForYet) {
  const DeferredInit deferred;
  const auto options = at::TensorOptions().pinned_memory(true);
  EXPECT_TRUE(is_deferred(torch::zeros({3}, options)));
}

TEST_F(DeferredInitTest, SettingDataSwapsMemoryInAndOut) {
  torch::nn::Linear linear{nullptr};
  auto memory = torch::zeros({2});
  {
    const DeferredInit deferred;
    linear = torch::nn::Linear(2, 3);
    linear->bias.set_data(torch::tensor({1.F, 2.F, 3.F}));
    EXPECT_FALSE(is_deferred(linear->bias));
    memory.set_data(torch::ones({3}));
    EXPECT_TRUE(is_deferred(memory));
  }
  EXPECT_TRUE(linear->bias.requires_grad());
  linear->weight.set_data(torch::full({3, 2}, 4.F));
  EXPECT_FALSE(is_deferred(linear->weight));
  EXPECT_EQ(linear->weight.sum().item<float>(), 24);
  EXPECT_EQ(linear->bias.sum().item<float>(), 6);
  EXPECT_EQ(replay(memory).sum().item<float>(), 3);
  EXPECT_EQ(memory.set_(torch::full({4}, 2.F)).sum().item<float>(), 8);
  linear->forward(torch::ones({1, 2})).sum().backward();
  EXPECT_EQ(linear->bias.grad().numel(), 3);
}

TEST_F(DeferredInitTest, ThreadsMayReplayAtTheSameTime) {
  const Make make = [] {
    return torch::nn::Sequential(
               torch::nn::Linear(40, 50), torch::nn::Linear(50, 60))
        .ptr();
  };
  const Named expected = tensors_of(*make_plain(make));
  const auto one = make_deferred(make);
  std::shared_ptr<Module> other;
  std::thread([&] { other = make_deferred(make); }).join();
  std::vector<std::thread> threads;
  for (const auto& module : {one, other, one, other}) {
    threads.emplace_back([&expected, module] {
      const Named tensors = tensors_of(*module);
      for (size_t i = tensors.size(); i-- > 0;) {
        EXPECT_TRUE(at::equal(replay(tensors[i].second), expected[i].second));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST_F(DeferredInitTest, SavingADeferredModelThrows) {
  torch::nn::Linear linear{nullptr};
  {
    const DeferredInit deferred;
    linear = torch::nn::Linear(3, 4);
  }
  std::stringstream file;
  EXPECT_THAT(
      error_of([&] { torch::save(linear, file); }),
      ::testing::HasSubstr("a deferred tensor has no values yet"));
  materialize(*linear);
  std::stringstream whole;
  torch::save(linear, whole);
  torch::nn::Linear loaded(3, 4);
  torch::load(loaded, whole);
  EXPECT_TRUE(at::equal(loaded->weight, linear->weight));
}

TEST_F(DeferredInitTest, LoadingAFileGivesMemory) {
  torch::nn::Linear saved(3, 4);
  for (const bool in_guard : {true, false}) {
    std::stringstream file;
    torch::save(saved, file);
    torch::nn::Linear linear{nullptr};
    {
      const DeferredInit deferred;
      linear = torch::nn::Linear(3, 4);
      if (in_guard) {
        torch::load(linear, file);
      }
    }
    if (!in_guard) {
      torch::load(linear, file);
    }
    EXPECT_EQ(num_deferred(*linear), 0);
    EXPECT_TRUE(at::equal(linear->weight, saved->weight));
    EXPECT_TRUE(linear->weight.requires_grad());
  }
}

} // namespace
} // namespace tessera
