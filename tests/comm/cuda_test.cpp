// CUDA tensors: over NCCL, and through host memory where ranks share a device.
#include <tessera/comm/group.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>

#include "comm/backends/backends.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using ::testing::HasSubstr;

const at::Device kDevice{at::kCUDA, 0};

TEST(NcclTest, TheBackendRunsOnADevice) {
  ASSERT_TRUE(comm::nccl_is_built());
  const auto carrier = comm::make_nccl_backend(
      {.store = c10::make_intrusive<c10d::HashStore>(),
       .rank = 0,
       .global_ranks = {0},
       .timeout = std::chrono::seconds(30)});
  const comm::Call call;
  constexpr auto kSum = c10d::ReduceOp::SUM;
  const auto tensor = torch::full({1000}, 2.0f, kDevice);
  carrier->all_reduce(call, tensor, kSum, /*async=*/true)->wait();
  EXPECT_EQ(tensor.sum().item<float>(), 2000);
  const auto output = torch::empty({1000}, kDevice);
  carrier->all_gather(call, output, tensor, /*async=*/true)->wait();
  EXPECT_EQ(output.sum().item<float>(), 2000);
  const auto shard = torch::empty({1000}, kDevice);
  carrier->reduce_scatter(call, shard, output, kSum, /*async=*/true)->wait();
  EXPECT_EQ(shard.sum().item<float>(), 2000);
  carrier->backend()->shutdown();
}

TEST(NcclTest, TwoRanksOnOneDeviceAreRefusedWithAReason) {
  if (torch::cuda::device_count() > 1) {
    GTEST_SKIP() << "there is a device for each rank";
  }
  on_ranks(2, [](const Group& world) {
    EXPECT_NE(world.backend(at::kCUDA), "nccl");
  });
}

/// The wire is a stream of its own: who issues a collective goes on, who waits
/// for it waits on the device.
TEST(CudaFakeGroupTest, CollectivesTakeTheirTimeOnAStreamOfTheirOwn) {
  using Clock = std::chrono::steady_clock;
  const Group world = init(InitOptions()
                               .backend("fake")
                               .rank(0)
                               .world_size(4)
                               .local_rank(0)
                               .fake_bandwidth(1e6));
  world.all_reduce(torch::ones({1}, kDevice)); // the first compiles a kernel
  const auto output = torch::zeros({4, 250000}, kDevice); // 3 MB travel
  const auto input = torch::full({250000}, 2.0f, kDevice);
  (input * 3).sum().item<float>(); // loading a kernel may wait for the device
  const auto start = Clock::now();
  Work gather = world.all_gather_into_async(output, input);
  EXPECT_EQ((input * 3).sum().item<float>(), 1500000); // does not wait for it
  EXPECT_FALSE(gather.done());
  gather.wait();
  EXPECT_EQ(output.sum().item<float>(), 2000000);
  EXPECT_TRUE(gather.done());
  const std::chrono::duration<double> taken = Clock::now() - start;
  EXPECT_GE(taken.count(), 2.7);
  shutdown();
}

/// Beside matrix products, too, for which a GPU may lower its clock.
TEST(CudaFakeGroupTest, CollectivesTakeTheirTimeBesideComputing) {
  const auto carrier = comm::make_fake_backend(
      {.global_ranks = {0, 1, 2, 3}, .fake_wire = {.latency_seconds = 0.01}},
      at::kCUDA);
  const auto tensor = torch::ones({1}, kDevice);
  const auto all_reduce = [&] {
    carrier->all_reduce({}, tensor, c10d::ReduceOp::SUM, /*async=*/true)
        ->wait();
  };
  all_reduce();
  const auto matrix =
      torch::ones({8192, 8192}, torch::dtype(torch::kBFloat16).device(kDevice));
  auto product = torch::mm(matrix, matrix);
  torch::cuda::synchronize();
  for (int i = 0; i < 300; ++i) { // a quarter of a second at least
    torch::mm_out(product, matrix, matrix);
  }
  const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
  const c10::StreamGuard beside(gpu.getStreamFromGlobalPool(kDevice));
  const auto timed = c10::EventFlag::BACKEND_DEFAULT;
  c10::Event begin(at::kCUDA, timed);
  c10::Event end(at::kCUDA, timed);
  begin.record(beside.current_stream());
  for (int i = 0; i < 10; ++i) {
    all_reduce();
  }
  end.record(beside.current_stream());
  torch::cuda::synchronize();
  EXPECT_NEAR(begin.elapsedTime(end), 100, 5);
}

/// A future completes with the GPU whose tensors it has.
TEST(CudaFakeGroupTest, FuturesHaveTensorsOfTheGpu) {
  for (const double latency : {0.0, 0.01}) {
    const auto carrier = comm::make_fake_backend(
        {.global_ranks = {0, 1}, .fake_wire = {.latency_seconds = latency}},
        at::kCUDA);
    const auto tensor = torch::ones({4}, kDevice);
    const auto work =
        carrier->all_reduce({}, tensor, c10d::ReduceOp::SUM, /*async=*/true);
    const auto future = work->getFuture();
    future->wait();
    EXPECT_FALSE(future->hasError());
    EXPECT_EQ(future->value().toTensorVector().at(0).sum().item<float>(), 4);
    EXPECT_TRUE(work->isCompleted());
    torch::cuda::synchronize();
  }
}

class CudaGroupTest : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(RanksOptions{.size = 2, .backend = GetParam()}, body);
  }
};

TEST_P(CudaGroupTest, CollectivesOfDeviceTensors) {
  run([](const Group& world) {
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      const auto options = torch::dtype(dtype).device(kDevice);
      auto gathered = torch::zeros({2, 5}, options);
      world.all_gather_into(
          gathered, torch::full({5}, world.rank() + 1, options));
      EXPECT_EQ(gathered.sum().item<double>(), 15);
      auto shard = torch::zeros({5}, options);
      world.reduce_scatter(shard, torch::ones({2, 5}, options));
      EXPECT_EQ(shard.sum().item<double>(), 10);
      auto reduced = torch::full({3}, world.rank() + 1, options);
      world.all_reduce(reduced);
      EXPECT_EQ(reduced.sum().item<double>(), 9);
      auto sent = torch::full({3}, world.rank() + 1, options);
      world.broadcast(sent, 1);
      EXPECT_EQ(sent.sum().item<double>(), 6);
      auto swapped = torch::zeros({2}, options);
      world.all_to_all(swapped, torch::full({2}, world.rank() + 1, options));
      EXPECT_EQ(swapped.sum().item<double>(), 3);
      const bool is_root = world.rank() == 1;
      const auto mine = torch::full({5}, world.rank() + 1, options);
      auto collected = torch::zeros({2, 5}, options);
      world.gather(is_root ? collected : at::Tensor(), mine, 1);
      EXPECT_EQ(collected.sum().item<double>(), is_root ? 15 : 0);
      auto part = torch::zeros({5}, options);
      world.scatter(part, is_root ? collected : at::Tensor(), 1);
      EXPECT_EQ(part.sum().item<double>(), 5 * (world.rank() + 1));
      auto total = mine.clone();
      world.reduce(total, 1);
      EXPECT_EQ(total.sum().item<double>(), is_root ? 15 : 5);
      auto message = torch::zeros({5}, options);
      auto send = world.send_async(mine, 1 - world.rank(), 6);
      world.recv(message, 1 - world.rank(), 6);
      send.wait();
      EXPECT_EQ(message.sum().item<double>(), 5 * (2 - world.rank()));
    }
    auto mean = torch::full({4}, 1.0f + 2.0f * world.rank(), kDevice);
    auto work = world.all_reduce_async(mean, ReduceOp::Avg);
    work.wait();
    EXPECT_EQ(mean[3].item<float>(), 2);
    auto flags = torch::full({2}, world.rank() == 0, kDevice);
    world.all_reduce(flags);
    EXPECT_TRUE(flags.all().item<bool>());
  });
}

TEST_P(CudaGroupTest, HostAndDeviceDoNotMix) {
  run([](const Group& world) {
    try {
      world.all_gather_into(torch::empty({2}, kDevice), torch::empty({1}));
      FAIL();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("input is Float on cpu"));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Backends,
    CudaGroupTest,
    ::testing::Values("shm", "gloo"),
    [](const auto& test) { return test.param; });

} // namespace
} // namespace tessera
