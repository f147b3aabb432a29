// Deferred construction of models on a GPU.
#include "deferred/replay.h"

namespace tessera {
namespace {

using deferred::intended_device;
using deferred::replay;
using ::testing::HasSubstr;

const at::Device kGpu(at::kCUDA, 0);

/// Draws random numbers on both devices.
struct Net : torch::nn::Module {
  Net() {
    register_parameter("gpu", torch::randn({300, 70}, at::kCUDA));
    register_parameter("cpu", torch::rand({5, 6}));
    register_buffer("dropped", torch::dropout(torch::ones({99}, kGpu), .5, 1));
    torch::manual_seed(3);
    register_buffer("moved", torch::rand({40}).to(at::kCUDA).normal_());
    torch::manual_seed(3);
    register_buffer("again", torch::rand({40}, kGpu));
    register_buffer("chosen", torch::rand({9, 9}, kGpu).multinomial(2));
    register_buffer("order", torch::randperm(50, kGpu));
    register_module("linear", torch::nn::Linear(30, 40))->to(kGpu);
    torch::nn::init::normal_(named_parameters()["linear.bias"]);
  }
};

std::shared_ptr<Net> make_deferred() {
  torch::manual_seed(7);
  const DeferredInit deferred;
  return std::make_shared<Net>();
}

TEST(DeferredInitCudaTest, MatchesPlainConstruction) {
  torch::manual_seed(7);
  Net plain;
  const auto module = make_deferred();
  torch::manual_seed(21);
  const auto state =
      at::globalContext().defaultGenerator(kGpu).get_state().clone();
  for (const auto& item : plain.named_parameters()) {
    const auto tensor = module->named_parameters()[item.key()];
    ASSERT_TRUE(is_deferred(tensor)) << item.key();
    EXPECT_EQ(intended_device(tensor), item.value().device()) << item.key();
    EXPECT_TRUE(at::equal(replay(tensor), item.value())) << item.key();
  }
  materialize(*module);
  for (const auto& item : plain.named_parameters()) {
    const auto tensor = module->named_parameters()[item.key()];
    EXPECT_EQ(tensor.device(), item.value().device()) << item.key();
    EXPECT_TRUE(at::equal(tensor, item.value())) << item.key();
  }
  for (const auto& item : plain.named_buffers()) {
    const auto tensor = module->named_buffers()[item.key()];
    EXPECT_EQ(tensor.device(), item.value().device()) << item.key();
    EXPECT_TRUE(at::equal(tensor, item.value())) << item.key();
  }
  EXPECT_TRUE(
      at::equal(at::globalContext().defaultGenerator(kGpu).get_state(), state));
}

TEST(DeferredInitCudaTest, EachTensorAloneMatchesPlainConstruction) {
  torch::manual_seed(7);
  Net plain;
  for (const auto& item : plain.named_buffers()) {
    const auto module = make_deferred();
    EXPECT_TRUE(
        at::equal(replay(module->named_buffers()[item.key()]), item.value()))
        << item.key();
  }
}

TEST(DeferredInitCudaTest, MovingAfterTheGuardMatchesPlainConstruction) {
  torch::manual_seed(7);
  torch::nn::LSTM plain(5, 6);
  plain->to(kGpu);
  torch::manual_seed(7);
  torch::nn::LSTM module{nullptr};
  {
    const DeferredInit deferred;
    module = torch::nn::LSTM(5, 6);
  }
  module->to(kGpu);
  EXPECT_EQ(intended_device(module->parameters()[0]), kGpu);
  materialize(*module);
  const auto input = torch::ones({2, 3, 5}, kGpu);
  EXPECT_TRUE(at::equal(
      std::get<0>(module->forward(input)), std::get<0>(plain->forward(input))));
}

TEST(DeferredInitCudaTest, GuardsInARowMatchPlainConstruction) {
  torch::manual_seed(7);
  const auto first = torch::rand({50}, kGpu);
  const auto second = torch::rand({50}, kGpu);
  torch::manual_seed(7);
  struct Holder : torch::nn::Module {
    Holder() {
      register_buffer("tensor", torch::rand({50}, kGpu));
    }
  };
  for (const auto& expected : {first, second}) {
    const auto holder = [] {
      const DeferredInit deferred;
      return std::make_shared<Holder>();
    }();
    materialize(*holder);
    EXPECT_TRUE(at::equal(holder->buffers()[0], expected));
  }
}

TEST(DeferredInitCudaTest, PinnedMemoryIsKept) {
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::zeros({3}, at::TensorOptions().pinned_memory(true));
  }
  EXPECT_TRUE(replay(tensor).is_pinned());
}

TEST(DeferredInitCudaTest, RejectsDevicesThatAreNotNamed) {
  const DeferredInit deferred;
  const auto cpu = torch::rand({3});
  const auto gpu = torch::rand({3}, kGpu);
  try {
    torch::zeros({3}, gpu.options());
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(
        error.what(), HasSubstr("for several devices. Name the device"));
  }
  try {
    cpu.to(gpu);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("Name the device instead"));
  }
}

} // namespace
} // namespace tessera
