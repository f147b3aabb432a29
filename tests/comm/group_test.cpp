#include <tessera/comm/group.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <barrier>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "base/byte_vector.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr at::ScalarType kMovable[] = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16,
    at::kChar,
    at::kByte,
    at::kShort,
    at::kInt,
    at::kLong,
    at::kBool,
    at::kComplexFloat,
    at::kFloat8_e4m3fn};
constexpr at::ScalarType kReducible[] = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16,
    at::kChar,
    at::kByte,
    at::kInt,
    at::kLong};

at::Tensor numbers(int rank, int64_t count, at::ScalarType dtype) {
  // Small enough that sums over ranks are exact in every dtype.
  return ((torch::arange(count) + rank) % 5).to(dtype);
}

/// Compares in a dtype that has a comparison.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      at::equal(a.to(at::kComplexDouble), b.to(at::kComplexDouble));
}

/// Every collective, over each backend and world size.
class GroupTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(
        RanksOptions{
            .size = std::get<1>(GetParam()),
            .backend = std::get<0>(GetParam())},
        [&](const Group& world) {
          ASSERT_EQ(
              world.backend(),
              world.size() == 1 ? "none" : std::get<0>(GetParam()));
          body(world);
        });
  }
};

TEST_P(GroupTest, AllGatherMovesEveryDtype) {
  run([](const Group& world) {
    for (auto dtype : kMovable) {
      SCOPED_TRACE(c10::toString(dtype));
      for (int64_t count : {1, 7, 1000}) {
        auto output = torch::empty({world.size(), count}, dtype);
        world.all_gather_into(output, numbers(world.rank(), count, dtype));
        for (int peer = 0; peer < world.size(); ++peer) {
          EXPECT_TRUE(same(output[peer], numbers(peer, count, dtype)));
        }
      }
    }
  });
}

TEST_P(GroupTest, AllGatherInPlaceLargerThanASlot) {
  run([](const Group& world) {
    constexpr int64_t kCount = 700'001; // 2.8 MB per rank
    auto output = torch::full({world.size(), kCount}, -1.0f);
    output[world.rank()].copy_(numbers(world.rank(), kCount, at::kFloat));
    world.all_gather_into(output, output[world.rank()]);
    for (int peer = 0; peer < world.size(); ++peer) {
      EXPECT_TRUE(same(output[peer], numbers(peer, kCount, at::kFloat)));
    }
  });
}

TEST_P(GroupTest, ReduceScatterSumsEveryDtype) {
  run([](const Group& world) {
    for (auto dtype : kReducible) {
      SCOPED_TRACE(c10::toString(dtype));
      constexpr int64_t kCount = 333;
      auto sum = torch::zeros({world.size() * kCount}, at::kDouble);
      for (int peer = 0; peer < world.size(); ++peer) {
        sum += numbers(peer, world.size() * kCount, at::kDouble);
      }
      auto output = torch::empty({kCount}, dtype);
      world.reduce_scatter(
          output, numbers(world.rank(), world.size() * kCount, dtype));
      EXPECT_TRUE(
          same(output, sum.narrow(0, world.rank() * kCount, kCount).to(dtype)));
    }
  });
}

TEST_P(GroupTest, AllReduceKnowsEveryReduction) {
  run([](const Group& world) {
    const int n = world.size();
    const double sum = n * (n + 1) / 2.0;
    auto reduced = [&](ReduceOp op, at::ScalarType dtype) {
      auto tensor = torch::full({3}, world.rank() + 1).to(dtype);
      world.all_reduce(tensor, op);
      return tensor;
    };
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(c10::toString(dtype));
      const auto full = [&](double v) { return torch::full({3}, v).to(dtype); };
      EXPECT_TRUE(same(reduced(ReduceOp::Sum, dtype), full(sum)));
      EXPECT_TRUE(same(reduced(ReduceOp::Avg, dtype), full(sum / n)));
      EXPECT_TRUE(same(reduced(ReduceOp::Min, dtype), full(1)));
      EXPECT_TRUE(same(reduced(ReduceOp::Max, dtype), full(n)));
    }
    EXPECT_TRUE(same(
        reduced(ReduceOp::Max, at::kLong), torch::full({3}, n, at::kLong)));
  });
}

TEST_P(GroupTest, AverageDividesTheSum) {
  run([](const Group& world) {
    // 1/3 cannot be had by multiplying with a rounded reciprocal.
    auto tensor = torch::full({5}, world.rank() == 0 ? 0.1 : 0.7, at::kDouble);
    world.all_reduce(tensor, ReduceOp::Avg);
    double sum = 0.1;
    for (int peer = 1; peer < world.size(); ++peer) {
      sum += 0.7;
    }
    EXPECT_NEAR(tensor[0].item<double>(), sum / world.size(), 1e-15);
    auto input = torch::full({2L * world.size()}, 3.0f * (world.rank() + 1));
    auto output = torch::empty({2});
    world.reduce_scatter(output, input, ReduceOp::Avg);
    EXPECT_FLOAT_EQ(output[1].item<float>(), 3.0f * (world.size() + 1) / 2);
  });
}

TEST_P(GroupTest, BoolReducesAsLogic) {
  run([](const Group& world) {
    auto flags = [&] {
      return torch::tensor({true, world.rank() == 0, false});
    };
    auto any = flags();
    world.all_reduce(any, ReduceOp::Sum);
    EXPECT_TRUE(same(any, torch::tensor({true, true, false})));
    auto all = flags();
    world.all_reduce(all, ReduceOp::Min);
    EXPECT_TRUE(same(all, torch::tensor({true, world.size() == 1, false})));
    // Not 2 in disguise.
    EXPECT_EQ(any.to(at::kLong).sum().item<int64_t>(), 2);
  });
}

TEST_P(GroupTest, ComplexNumbersSum) {
  run([](const Group& world) {
    auto tensor = torch::complex(
        torch::full({2}, 1.0f), torch::full({2}, 1.0f * world.rank()));
    world.all_reduce(tensor);
    const float n = static_cast<float>(world.size());
    EXPECT_EQ(
        tensor[0].item<c10::complex<float>>(),
        c10::complex<float>(n, n * (n - 1) / 2));
  });
}

TEST_P(GroupTest, AllReduceGivesTheSameBitsEverywhere) {
  run([](const Group& world) {
    for (int64_t count : {100, 300'000}) {
      torch::manual_seed(world.rank());
      auto tensor = torch::randn({count});
      world.all_reduce(tensor);
      auto all = torch::empty({world.size(), count});
      world.all_gather_into(all, tensor);
      for (int peer = 0; peer < world.size(); ++peer) {
        EXPECT_TRUE(at::equal(all[peer], tensor));
      }
    }
  });
}

TEST_P(GroupTest, BroadcastFromEveryRoot) {
  run([](const Group& world) {
    for (int root = 0; root < world.size(); ++root) {
      for (int64_t count : {3, 400'000}) {
        auto tensor = numbers(world.rank(), count, at::kBFloat16);
        world.broadcast(tensor, root);
        EXPECT_TRUE(same(tensor, numbers(root, count, at::kBFloat16)));
      }
    }
  });
}

TEST_P(GroupTest, AllToAllTransposes) {
  run([](const Group& world) {
    const int n = world.size();
    for (auto dtype : {at::kFloat, at::kShort, at::kBool}) {
      auto input = (torch::arange(n) + 10 * world.rank()).to(dtype);
      auto output = torch::empty({n}, dtype);
      world.all_to_all(output, input);
      auto expected = (10 * torch::arange(n) + world.rank()).to(dtype);
      EXPECT_TRUE(same(output, expected));
    }
    // Rank r sends r + 1 rows to everyone.
    const int64_t mine = world.rank() + 1;
    std::vector<int64_t> sends(static_cast<size_t>(n), mine);
    std::vector<int64_t> receives(static_cast<size_t>(n));
    std::iota(receives.begin(), receives.end(), 1);
    auto input = torch::full({mine * n, 2}, world.rank(), at::kFloat);
    auto output = torch::empty({n * (n + 1) / 2, 2});
    world.all_to_all(output, input, receives, sends);
    int64_t row = 0;
    for (int peer = 0; peer < n; ++peer) {
      EXPECT_EQ(
          output.narrow(0, row, peer + 1).sum().item<float>(),
          2.0f * peer * (peer + 1));
      row += peer + 1;
    }
  });
}

TEST_P(GroupTest, AsynchronousOperationsFinishInOrder) {
  run([](const Group& world) {
    auto a = torch::full({50'000}, 1.0f);
    auto b = torch::full({10}, world.rank() * 1.0f);
    auto gathered = torch::empty({world.size(), 10});
    auto first = world.all_reduce_async(a);
    auto second = world.all_gather_into_async(gathered, b);
    auto third = world.broadcast_async(b, 0);
    third.wait();
    EXPECT_EQ(b[0].item<float>(), 0);
    first.wait();
    second.wait();
    second.wait(); // again is nothing
    EXPECT_TRUE(second.done());
    EXPECT_EQ(a[49'999].item<float>(), world.size());
    EXPECT_EQ(gathered[world.size() - 1][3].item<float>(), world.size() - 1);
    auto output = torch::empty({4});
    auto scatter = world.reduce_scatter_async(
        output, torch::ones({4L * world.size()}), ReduceOp::Avg);
    world.barrier();
    scatter.wait();
    EXPECT_EQ(output[0].item<float>(), 1);
  });
}

TEST_P(GroupTest, AnOperationNobodyWaitsForStillHappens) {
  run([](const Group& world) {
    auto tensor = torch::ones({1000});
    { auto dropped = world.all_reduce_async(tensor); }
    world.barrier(); // comes after it
    auto after = torch::ones({1});
    world.all_reduce(after);
    EXPECT_EQ(after.item<float>(), world.size());
  });
}

TEST_P(GroupTest, BytesOfAnyLength) {
  run([](const Group& world) {
    for (size_t unit : {size_t{0}, size_t{1}, size_t{500'000}}) {
      auto of = [&](int rank) {
        return Bytes(
            unit * static_cast<size_t>(rank), static_cast<uint8_t>(rank));
      };
      const auto all = world.all_gather_bytes(of(world.rank()));
      ASSERT_EQ(static_cast<int>(all.size()), world.size());
      for (int peer = 0; peer < world.size(); ++peer) {
        EXPECT_EQ(all[static_cast<size_t>(peer)], of(peer));
      }
      const int last = world.size() - 1;
      EXPECT_EQ(world.broadcast_bytes(of(world.rank()), last), of(last));
      const auto gathered = world.gather_bytes(of(world.rank()), last);
      ASSERT_EQ(
          static_cast<int>(gathered.size()),
          world.rank() == last ? world.size() : 0);
      for (size_t peer = 0; peer < gathered.size(); ++peer) {
        EXPECT_EQ(gathered[peer], of(static_cast<int>(peer)));
      }
    }
  });
}

TEST_P(GroupTest, SplitOrdersByKey) {
  run([](const Group& world) {
    // All in one group, reversed.
    const auto reversed = world.split(0, -world.rank(), "reversed");
    ASSERT_TRUE(reversed.has_value());
    EXPECT_EQ(reversed->rank(), world.size() - 1 - world.rank());
    EXPECT_EQ(reversed->name(), "world/reversed");
    auto tensor = torch::full({1}, world.rank() * 1.0f);
    reversed->broadcast(tensor, 0);
    EXPECT_EQ(tensor.item<float>(), world.size() - 1);
    // Even and odd ranks; rank 0 stays out.
    const int color = world.rank() == 0 ? -1 : world.rank() % 2;
    const auto half = world.split(color, world.rank());
    EXPECT_EQ(half.has_value(), world.rank() != 0);
    if (half) {
      auto sum = torch::full({1}, world.rank() * 1.0f);
      half->all_reduce(sum);
      float expected = 0;
      for (int rank = 1; rank < world.size(); ++rank) {
        expected += rank % 2 == color ? static_cast<float>(rank) : 0.0f;
      }
      EXPECT_EQ(sum.item<float>(), expected);
    }
  });
}

TEST_P(GroupTest, SubgroupHasTheGivenOrder) {
  run([](const Group& world) {
    const std::vector<int> ranks{world.size() - 1, 0};
    if (world.size() == 1) {
      EXPECT_THROW(world.subgroup(ranks), c10::ValueError);
      return;
    }
    const auto group = world.subgroup(ranks, "ends");
    EXPECT_EQ(
        group.has_value(),
        world.rank() == 0 || world.rank() == world.size() - 1);
    if (group) {
      EXPECT_EQ(group->rank(), world.rank() == 0 ? 1 : 0);
      EXPECT_EQ(group->global_ranks(), ranks);
    }
  });
}

TEST_P(GroupTest, RejectsTensorsThatDoNotFit) {
  run([](const Group& world) {
    const auto error_of = [](const std::function<void()>& body) {
      try {
        body();
      } catch (const c10::ValueError& error) {
        return std::string(error.what());
      }
      return std::string("nothing was thrown");
    };
    const int n = world.size();
    EXPECT_THAT(
        error_of([&] {
          world.all_gather_into(torch::empty({n * 3 + 1}), torch::empty({3}));
        }),
        HasSubstr("with " + std::to_string(n) + " ranks output needs"));
    EXPECT_THAT(
        error_of([&] {
          world.all_gather_into(
              torch::empty({n * 3}), torch::empty({3}, at::kDouble));
        }),
        HasSubstr("output is Float on cpu, input is Double on cpu"));
    EXPECT_THAT(
        error_of([&] {
          world.all_reduce(torch::empty({4, 4}).t());
        }),
        HasSubstr("not dense and contiguous"));
    EXPECT_THAT(
        error_of([&] {
          world.all_reduce(torch::ones({2}, at::kComplexFloat).conj());
        }),
        HasSubstr("resolve_conj()"));
    EXPECT_THAT(
        error_of([&] {
          world.all_to_all(
              torch::empty({3}),
              torch::empty({1}),
              std::vector<int64_t>{1, 2, 3, 4, 5},
              std::vector<int64_t>{1});
        }),
        HasSubstr("output splits [1, 2, 3, 4, 5] must be"));
    if (world.rank() == 0) { // on one rank: the others must not be affected
      EXPECT_THAT(
          error_of([&] { world.all_reduce(torch::ones({2}, at::kUInt16)); }),
          HasSubstr("UInt16 cannot be reduced"));
    }
    EXPECT_THAT(
        error_of([&] { world.all_reduce(at::Tensor()); }),
        HasSubstr("undefined tensor"));
    EXPECT_THAT(
        error_of([&] { world.broadcast(torch::empty({1}), n); }),
        HasSubstr("root is " + std::to_string(n)));
    EXPECT_THAT(
        error_of([&] {
          world.all_reduce(torch::ones({2}, at::kLong), ReduceOp::Avg);
        }),
        HasSubstr("an average of Long is not defined"));
    if (n > 1) {
      auto whole = torch::empty({n * 4});
      EXPECT_THAT(
          error_of(
              [&] { world.all_gather_into(whole, whole.narrow(0, 1, 4)); }),
          HasSubstr("input overlaps output"));
    }
    // Nothing was sent: the group stays usable.
    auto tensor = torch::ones({1});
    world.all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), n);
  });
}

TEST_P(GroupTest, TakesParametersAndEmptyTensors) {
  run([](const Group& world) {
    auto parameter = torch::ones({3}, torch::requires_grad());
    world.broadcast(parameter, 0);
    world.all_reduce(parameter);
    EXPECT_EQ(parameter[0].item<float>(), world.size());
    EXPECT_TRUE(parameter.is_leaf());
    auto none = torch::empty({0});
    world.all_reduce(none);
    world.broadcast(none, 0);
    world.all_gather_into(torch::empty({0}), none);
    world.reduce_scatter(torch::empty({0}), none);
  });
}

std::string backend_and_size(
    const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    Backends,
    GroupTest,
    ::testing::Combine(
        ::testing::Values("shm", "gloo"),
        ::testing::Values(1, 2, 3, 4)),
    backend_and_size);

TEST(FakeGroupTest, ShapesAreThoseOfAWorldThatIsNotThere) {
  const Group world =
      init(InitOptions().backend("fake").rank(0).world_size(512).local_rank(0));
  EXPECT_EQ(world.size(), 512);
  EXPECT_EQ(world.backend(), "fake");
  auto output = torch::empty({512, 3});
  world.all_gather_into(output, torch::ones({3}));
  EXPECT_EQ(output.sum().item<float>(), 1536);
  auto part = torch::empty({2});
  world.reduce_scatter(part, torch::ones({1024}), ReduceOp::Avg);
  EXPECT_EQ(part[0].item<float>(), 1);
  world.barrier();
  const auto half = world.split(0, 0);
  EXPECT_EQ(half->size(), 512);
  shutdown();
}

TEST(FakeGroupTest, PretendsToBeAsSlowAsAsked) {
  using Clock = std::chrono::steady_clock;
  const Group world = init(InitOptions()
                               .backend("fake")
                               .rank(0)
                               .world_size(4)
                               .local_rank(0)
                               .fake_bandwidth(1e6)
                               .fake_latency(0.05));
  const auto output = torch::empty({4, 25000}); // 400 kB, of which 300 travel
  const auto start = Clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  Work first = world.all_gather_into_async(output, torch::ones({25000}));
  const auto later = torch::empty({4, 25000000}); // 300 s
  Work second = world.all_gather_into_async(later, torch::ones({25000000}));
  first.wait();
  EXPECT_GE(seconds(), 0.35);
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(second.done()); // nobody waits for what is behind
  EXPECT_EQ(output.sum().item<float>(), 100000);
  shutdown();
}

TEST(FakeGroupTest, ThreadsThatBeginTogetherShareTheWire) {
  for (int round = 0; round < 20; ++round) {
    constexpr int kThreads = 8;
    constexpr double kLatency = 2e-3;
    const Group world = init(InitOptions()
                                 .backend("fake")
                                 .rank(0)
                                 .world_size(4)
                                 .local_rank(0)
                                 .fake_latency(kLatency));
    std::barrier<> together(kThreads + 1);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        const auto tensor = torch::ones({1});
        together.arrive_and_wait();
        world.all_reduce(tensor);
      });
    }
    const auto start = std::chrono::steady_clock::now();
    together.arrive_and_wait();
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::chrono::duration<double> taken =
        std::chrono::steady_clock::now() - start;
    EXPECT_GE(taken.count(), kThreads * kLatency);
    shutdown();
  }
}

TEST(FakeGroupTest, OnlyWhatPretendsMaySlowDown) {
  const auto error_for = [](const InitOptions& options) {
    return testing::error_of([&] { init(options); });
  };
  EXPECT_THAT(
      error_for(InitOptions().fake_bandwidth(1e9)), HasSubstr("\"fake\""));
  EXPECT_THAT(
      error_for(InitOptions().backend("fake").fake_latency(-1)),
      HasSubstr("0 or more"));
}

TEST(GroupHandleTest, AnEmptyHandleSaysWhereToGetOne) {
  const Group none;
  EXPECT_FALSE(none.valid());
  try {
    none.rank();
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("tessera::init()"));
  }
}

} // namespace
} // namespace tessera
