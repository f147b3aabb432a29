// Saving what a GPU is still computing.
#include <tessera/checkpoint/checkpoint.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using testing::on_ranks;
using testing::TempFolder;

constexpr int kTensors = 8;

/// Some hundred milliseconds of work on the current stream.
at::Tensor keep_busy() {
  at::Tensor value = torch::randn({4096, 4096}, at::kCUDA);
  const at::Tensor other = torch::randn({4096, 4096}, at::kCUDA);
  for (int i = 0; i < 300; ++i) {
    value = torch::mm(value, other).tanh_();
  }
  return value;
}

/// Tensors that are filled after other work on a stream of the pool are saved
/// with their new values.
void check_pending(bool is_async, at::DeviceType where) {
  const TempFolder folder;
  const at::Device device(at::kCUDA, 0);
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  keep_busy(); // the first use of a kernel may wait for the device
  StateDict state;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back(torch::zeros(
        {1 << 20}, at::TensorOptions(where).pinned_memory(where == at::kCPU)));
    state.set("t" + std::to_string(i), tensors.back());
  }
  const at::Tensor ones = torch::ones({1 << 20}, device);
  cuda.synchronizeDevice(0);
  {
    const c10::StreamGuard guard(cuda.getStreamFromGlobalPool(device, false));
    const at::Tensor busy = keep_busy();
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(ones, /*non_blocking=*/true);
    }
    const auto options = checkpoint::SaveOptions().files_per_rank(4);
    if (is_async) {
      checkpoint::async_save(state, folder / "c", options).wait();
    } else {
      checkpoint::save(state, folder / "c", options);
    }
  }
  const StateDict read = checkpoint::read(folder / "c");
  for (int i = 0; i < kTensors; ++i) {
    EXPECT_EQ(
        read.at("t" + std::to_string(i)).tensor().sum().item<float>(), 1 << 20)
        << "tensor " << i;
  }
}

TEST(CudaSaveTest, WaitsForTheCallersStream) {
  check_pending(/*is_async=*/false, at::kCUDA);
}

TEST(CudaSaveTest, WaitsForTheCallersStreamBehindTraining) {
  check_pending(/*is_async=*/true, at::kCUDA);
}

TEST(CudaSaveTest, WaitsForWhatComesIntoPinnedMemory) {
  check_pending(/*is_async=*/false, at::kCPU);
  check_pending(/*is_async=*/true, at::kCPU);
}

TEST(CudaSaveTest, ComparesCopiesWhereTheyAre) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const auto state_with = [&](int value, bool on_host) {
      at::Tensor large = torch::zeros({1 << 20}, at::kCUDA);
      large[12345] = value;
      const at::Tensor small = torch::ones({3}, at::kCUDA);
      return StateDict{{"large", on_host ? large.cpu() : large}, {"s", small}};
    };
    checkpoint::save(state_with(1, false), folder / "same");
    checkpoint::async_save(state_with(1, false), folder / "behind").wait();
    checkpoint::save(state_with(1, world.rank() == 1), folder / "mixed");
    for (const bool on_host : {false, true}) {
      EXPECT_THAT(
          testing::error_of([&] {
            checkpoint::save(
                state_with(world.rank(), on_host && world.rank() == 1),
                folder / "other");
          }),
          ::testing::HasSubstr("\"large\": rank 1 against rank 0"));
    }
  });
}

} // namespace
} // namespace tessera
