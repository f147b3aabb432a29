// A step reads no value of a tensor: the host never waits for a device.
#include "support/host_reads.h"

#include <tessera/optim/adamw.h>
#include <tessera/optim/lr_schedules.h>
#include <tessera/train/grad_scaler.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fsdp/clip_on_device.h"
#include "train/front_ends.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

constexpr double kOverflow = std::numeric_limits<double>::infinity();

class HostReadsTest : public ::testing::TestWithParam<FrontEnd> {};

/// Reads in the second of two steps: the first compares the ranks.
template <class Step>
int reads_of(Step step) {
  step();
  const HostReads reads;
  step();
  return reads.count();
}

/// By SGD: LibTorch's kernel of AdamW for the CPU reads the counts of steps,
/// from the host's own memory; its kernels for devices do not.
TEST_P(HostReadsTest, AStepWithClippingReadsNothing) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](const Group& world) {
      Trained<> trained(GetParam());
      optim::ConstantLR schedule(*trained.optimizer);
      const int reads = reads_of([&] {
        loss_of(trained.model, tokens(world.rank(), 0)).backward();
        clip_grad_norm_(trained.model, 0.1);
        trained.optimizer->step();
        trained.optimizer->zero_grad();
        schedule.step();
      });
      EXPECT_EQ(reads, 0);
    });
  }
}

TEST_P(HostReadsTest, AccumulationReadsTheNormWhereItIsAskedFor) {
  on_ranks(2, [&](const Group& world) {
    Trained<> trained(GetParam());
    const auto count = [&](const GradientAccumulationOptions& options) {
      const auto accumulation = trained.accumulate(options);
      return reads_of([&] {
        accumulation->backward(loss_of(trained.model, tokens(world.rank(), 0)));
        accumulation->backward(loss_of(trained.model, tokens(world.rank(), 1)));
      });
    };
    const auto options = GradientAccumulationOptions().steps(2).max_norm(1.0);
    EXPECT_EQ(count(options), 0);
    EXPECT_EQ(
        count(GradientAccumulationOptions(options).error_if_nonfinite(true)),
        1);
  });
}

/// Whether to step is read once, and only because SGD cannot leave out a step
/// on the device: Adam and AdamW can.
TEST_P(HostReadsTest, AScaledStepReadsWhetherToStepAlone) {
  on_ranks(2, [&](const Group& world) {
    Trained<> trained(GetParam());
    GradScaler scaler;
    const int reads = reads_of([&] {
      scaler.scale(loss_of(trained.model, tokens(world.rank(), 0))).backward();
      scaler.unscale_(*trained.optimizer);
      scaler.clip_grad_norm_(trained.model, 0.1);
      scaler.step(*trained.optimizer);
      scaler.update();
      trained.optimizer->zero_grad();
    });
    EXPECT_EQ(reads, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(
    FrontEnds,
    HostReadsTest,
    ::testing::Values(FrontEnd::Flat, FrontEnd::Dim0, FrontEnd::Ddp),
    [](const auto& test) { return name_of(test.param); });

/// A meta tensor has no values, so whoever reads one gets an error: what runs
/// on meta tensors waits for no device. LibTorch's C++ lacks these kernels for
/// them. They compute nothing here, but tell what they were given.
int num_conditional_steps = 0;

void unscale_without_values(
    at::TensorList /*self*/,
    at::Tensor& /*found_inf*/,
    const at::Tensor& /*inv_scale*/) {}

at::Tensor& update_scale_without_values(
    at::Tensor& self,
    at::Tensor& /*growth_tracker*/,
    const at::Tensor& /*found_inf*/,
    double /*growth_factor*/,
    double /*backoff_factor*/,
    int64_t /*growth_interval*/) {
  return self;
}

at::Tensor& same_shape(const at::Tensor& self, at::Tensor& out) {
  out.resize_(self.sizes());
  return out;
}

void adamw_without_values(
    at::TensorList /*self*/,
    at::TensorList /*grads*/,
    at::TensorList /*exp_avgs*/,
    at::TensorList /*exp_avg_sqs*/,
    at::TensorList /*max_exp_avg_sqs*/,
    at::TensorList /*state_steps*/,
    double /*lr*/,
    double /*beta1*/,
    double /*beta2*/,
    double /*weight_decay*/,
    double /*eps*/,
    bool /*amsgrad*/,
    bool /*maximize*/,
    const std::optional<at::Tensor>& /*grad_scale*/,
    const std::optional<at::Tensor>& found_inf) {
  num_conditional_steps += found_inf && found_inf->is_meta() ? 1 : 0;
}

TEST(ScalerOnADeviceTest, NothingOfAnAdamWStepIsRead) {
  torch::Library kernels(
      torch::Library::IMPL, "aten", at::DispatchKey::Meta, __FILE__, __LINE__);
  kernels.impl(
      "_amp_foreach_non_finite_check_and_unscale_", unscale_without_values);
  kernels.impl("_amp_update_scale_", update_scale_without_values);
  kernels.impl("abs.out", same_shape);
  kernels.impl("logical_not.out", same_shape);
  kernels.impl("_fused_adamw_", adamw_without_values);

  torch::nn::Module model("model");
  const auto weight =
      model.register_parameter("weight", torch::ones({4, 2}, at::kMeta));
  optim::AdamW optimizer(model.parameters());
  GradScaler scaler;
  num_conditional_steps = 0;
  for (int step = 0; step < 3; ++step) {
    const auto input = torch::ones({3, 4}, at::kMeta);
    scaler.scale(input.matmul(weight).sum()).backward();
    scaler.unscale_(optimizer);
    scaler.clip_grad_norm_(model, 0.1);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  EXPECT_EQ(num_conditional_steps, 3);
  EXPECT_ANY_THROW(scaler.get_scale()); // which is a read
}

TEST(HostReadsCounterTest, AReadIsCounted) {
  const HostReads reads;
  const auto tensor = torch::ones({3});
  EXPECT_EQ(tensor.sum().item<double>(), 3);
  EXPECT_EQ(reads.count(), 1);
}

/// What is done on a GPU, on tensors of the CPU.
class ClipOnDeviceTest : public ::testing::TestWithParam<double> {};

TEST_P(ClipOnDeviceTest, ClipsAsOnTheHost) {
  const double p = GetParam();
  on_ranks(2, [&](const Group& world) {
    Stack here = make_stack();
    Stack there = make_stack();
    for (Stack* model : {&here, &there}) {
      shard_blocks(*model, FullyShardOptions().layout(ShardLayout::Dim0));
      loss_of(*model, tokens(world.rank(), 0)).backward();
    }
    const auto gradients = fsdp::gradients_of(*there);
    for (const double max_norm : {1e9, 0.05}) {
      const double expected = clip_grad_norm_(here, max_norm, p).item<double>();
      at::Tensor norm;
      {
        const at::NoGradGuard no_grad;
        const HostReads reads;
        norm = fsdp::clip_on_device(gradients, max_norm, p);
        EXPECT_EQ(reads.count(), 0);
      }
      EXPECT_NEAR(norm.item<double>(), expected, 1e-12 * expected);
      const auto ours = parameters(there);
      const auto theirs = parameters(here);
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(
            torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-12, 0));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Norms,
    ClipOnDeviceTest,
    ::testing::Values(1.0, 2.0, 3.5, kOverflow),
    [](const auto& test) { return "P" + std::to_string(test.index); });

TEST(ClipOnDeviceGradientsTest, KeepsDtypesAndANaN) {
  torch::nn::Sequential module(
      torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  module[1]->to(torch::kBFloat16);
  module->to(test_device());
  for (const auto& param : module->parameters()) {
    param.mutable_grad() = torch::full_like(param, 2);
  }
  const at::NoGradGuard no_grad;
  const auto gradients = fsdp::gradients_of(*module);
  const double norm = fsdp::clip_on_device(gradients, 1.0, 2.0).item<double>();
  EXPECT_DOUBLE_EQ(norm, 2 * std::sqrt(3 * 4 + 4 + 4 * 2 + 2));
  for (const auto& param : module->parameters()) {
    EXPECT_EQ(param.grad().scalar_type(), param.scalar_type());
    EXPECT_NEAR(param.grad().flatten()[0].item<double>(), 2 / norm, 2e-3);
  }
  module->parameters()[0].grad()[1][1] = std::nan("");
  fsdp::clip_on_device(gradients, 1.0, kOverflow);
  for (const auto& param : module->parameters()) {
    EXPECT_TRUE(param.grad().isnan().all().item<bool>());
  }
}

/// A GPU would launch kernels for each parameter otherwise.
TEST(ClipOnDeviceGradientsTest, TakesAllGradientsAtOnce) {
  torch::nn::Sequential module;
  for (int i = 0; i < 6; ++i) {
    module->push_back(torch::nn::Linear(3, 3));
  }
  module->to(test_device());
  for (const auto& param : module->parameters()) {
    param.mutable_grad() = torch::ones_like(param);
  }
  const at::NoGradGuard no_grad;
  const auto gradients = fsdp::gradients_of(*module);
  for (const char* once : {"aten::_foreach_norm", "aten::_foreach_mul_"}) {
    const OperatorCalls calls(once);
    fsdp::clip_on_device(gradients, 1.0, 2.0);
    EXPECT_EQ(calls.count(), 1) << once;
  }
}

} // namespace
} // namespace tessera
