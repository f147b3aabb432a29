#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <sys/wait.h>

#include "base/byte_vector.h"
#include "comm/group/group_impl.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using ::testing::HasSubstr;

TEST(SharedMemoryTest, ReductionsAddInTheOrderOfTheRanksWhateverTheirSize) {
  for (int size : {2, 3, 4}) {
    on_ranks(size, [](const Group& world) {
      // Around the size from which ranks share the work, and around a slot.
      for (int64_t count : {1, 2048, 2049, 2050, 5000, 262'145, 700'001}) {
        const auto of = [&](int rank) {
          torch::manual_seed(rank);
          return torch::randn({count});
        };
        auto expected = of(0);
        for (int rank = 1; rank < world.size(); ++rank) {
          expected += of(rank);
        }
        auto all = of(world.rank());
        world.all_reduce(all);
        EXPECT_TRUE(at::equal(all, expected)) << count;
        auto one = of(world.rank());
        world.reduce(one, world.size() - 1);
        const bool is_root = world.rank() == world.size() - 1;
        EXPECT_TRUE(at::equal(one, is_root ? expected : of(world.rank())));
      }
    });
  }
}

TEST(SharedMemoryTest, IsTheDefaultOnOneHost) {
  on_ranks(2, [](const Group& world) {
    EXPECT_EQ(world.backend(), "shm");
    EXPECT_TRUE(world.shares_memory());
  });
}

TEST(SharedMemoryTest, WhatOneRankWritesTheOthersSee) {
  on_ranks(3, [](const Group& world) {
    auto shared = world.allocate_shared({world.size(), 5}, at::kFloat);
    EXPECT_EQ(shared.sum().item<float>(), 0);
    world.barrier(); // all have looked
    shared[world.rank()].fill_(world.rank() + 1.0f);
    world.barrier();
    for (int peer = 0; peer < world.size(); ++peer) {
      EXPECT_EQ(shared[peer].sum().item<float>(), 5.0f * (peer + 1));
    }
    world.barrier();
  });
}

TEST(SharedMemoryTest, GatherIntoTheSharedBufferItself) {
  on_ranks(4, [](const Group& world) {
    constexpr int64_t kCount = 500'000;
    auto shared = world.allocate_shared({world.size(), kCount}, at::kFloat);
    shared[world.rank()].fill_(world.rank() + 1.0f);
    world.all_gather_into(shared, shared[world.rank()]);
    for (int peer = 0; peer < world.size(); ++peer) {
      EXPECT_EQ(shared[peer][kCount - 1].item<float>(), peer + 1.0f);
    }
  });
}

TEST(SharedMemoryTest, SharedInputsOfEveryRankOrOfSome) {
  on_ranks(3, [](const Group& world) {
    constexpr int64_t kCount = 400'000; // more than a slot
    auto shared = world.allocate_shared(
        {world.size(), kCount * world.size()}, at::kFloat);
    auto mine = shared[world.rank()];
    mine.fill_(world.rank() + 1.0f);
    auto private_copy = mine.clone();
    // Bit r of the pattern: rank r passes shared memory.
    for (int pattern = 0; pattern < 8; ++pattern) {
      const bool shares = (pattern >> world.rank() & 1) != 0;
      const auto input = shares ? mine : private_copy;
      auto output = torch::empty({kCount});
      world.reduce_scatter(output, input);
      EXPECT_EQ(output.min().item<float>(), 6);
      EXPECT_EQ(output.max().item<float>(), 6);
      auto gathered = torch::empty({world.size(), kCount});
      world.all_gather_into(gathered, input.narrow(0, 0, kCount));
      for (int peer = 0; peer < world.size(); ++peer) {
        EXPECT_EQ(gathered[peer][kCount - 1].item<float>(), peer + 1.0f);
      }
    }
  });
}

TEST(SharedMemoryTest, ABufferOutlivesItsGroup) {
  on_ranks(2, [](const Group& world) {
    at::Tensor shared;
    {
      const auto group = world.split(0, world.rank());
      shared = group->allocate_shared({4}, at::kInt);
      group->barrier();
    }
    shared.fill_(3);
    EXPECT_EQ(shared.sum().item<int64_t>(), 12);
  });
}

TEST(SharedMemoryTest, GlooSharesNothing) {
  on_ranks(RanksOptions{.size = 2, .backend = "gloo"}, [](const Group& world) {
    EXPECT_FALSE(world.shares_memory());
    try {
      world.allocate_shared({4}, at::kInt);
      FAIL();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("shares_memory()"));
    }
  });
}

TEST(SharedMemoryTest, RejectsSharedShapesThatDiffer) {
  on_ranks(2, [](const Group& world) {
    EXPECT_THROW(
        world.allocate_shared({4 + world.rank()}, at::kFloat),
        DisagreementError);
    EXPECT_THROW(world.allocate_shared({-1}, at::kFloat), c10::ValueError);
    EXPECT_EQ(world.allocate_shared({4}, at::kFloat).numel(), 4);
  });
}

TEST(SharedMemoryTest, ASharedBufferThatOneRankDroppedFailsOnEveryRank) {
  on_ranks(3, [](const Group& world) {
    const auto group = *world.split(0, world.rank()); // dies
    auto shared = group.allocate_shared({group.size(), 8}, at::kFloat);
    auto input = shared[group.rank()];
    if (group.rank() == 0) {
      shared = at::Tensor();
      input = torch::zeros({8});
    }
    auto output = torch::empty({group.size(), 8});
    try {
      group.all_gather_into(output, input);
      FAIL() << "nothing was thrown";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("shared buffer #1"));
    }
  });
}

TEST(SharedMemoryTest, LongLabelsAreComparedWhole) {
  on_ranks(2, [](const Group& world) {
    const std::string label =
        std::string(200, 'x') + (world.rank() == 0 ? "a" : "b");
    EXPECT_THROW(
        world.all_reduce(torch::ones({1}), ReduceOp::Sum, label),
        DisagreementError);
    // The root stands behind a shape that is too long to be shown.
    const auto many_dims = torch::ones(std::vector<int64_t>(40, 1));
    EXPECT_THROW(world.broadcast(many_dims, world.rank()), DisagreementError);
  });
}

TEST(SharedMemoryTest, OperationsThatGoOverGlooAreComparedToo) {
  on_ranks(2, [](const Group& world) {
    const int64_t count = world.rank() == 0 ? 4 : 6;
    EXPECT_THROW(
        world.all_to_all(torch::empty({count}), torch::ones({count})),
        DisagreementError);
    const Bytes bytes(3);
    EXPECT_THROW(world.gather_bytes(bytes, world.rank()), DisagreementError);
    auto output = torch::empty({2});
    world.all_to_all(output, torch::ones({2}));
    EXPECT_EQ(output.sum().item<float>(), 2);
  });
}

TEST(SharedMemoryTest, WorksAsAPlainC10dProcessGroup) {
  on_ranks(2, [](const Group& world) {
    // Through the dispatcher, as c10d's own code (the Reducer, say) calls it.
    auto& group = *world.impl().process_group();
    std::vector<at::Tensor> tensors{torch::ones({3}) * (world.rank() + 1)};
    group.allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 3);
    const auto backend = world.impl().carrier(at::kCPU)->backend();
    auto future = backend->allreduce(tensors)->getFuture();
    future->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 6);
    std::vector<std::vector<at::Tensor>> lists{
        {torch::empty({2}), torch::empty({2})}};
    std::vector<at::Tensor> inputs{torch::full({2}, world.rank() * 1.0f)};
    backend->allgather(lists, inputs)->wait();
    EXPECT_EQ(lists[0][1][1].item<float>(), 1);
    backend->barrier()->wait();
  });
}

TEST(SharedMemoryTest, DifferentLabelsOfEqualSizesAreNoticed) {
  // Two units of the same size: without labels, weights would be mixed up.
  on_ranks(2, [](const Group& world) {
    auto tensor = torch::ones({8});
    try {
      world.all_reduce(
          tensor, ReduceOp::Sum, world.rank() == 0 ? "layers.0" : "layers.1");
      FAIL() << "nothing was thrown";
    } catch (const DisagreementError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 0: all_reduce"));
      EXPECT_THAT(error.what(), HasSubstr("\"layers.1\""));
    }
    EXPECT_EQ(tensor[0].item<float>(), 1); // untouched
    world.all_reduce(tensor); // and the group stays usable
    EXPECT_EQ(tensor[0].item<float>(), 2);
  });
}

} // namespace
} // namespace tessera
