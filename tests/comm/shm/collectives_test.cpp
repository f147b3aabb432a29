#include "comm/shm/collectives.h"

#include <gtest/gtest.h>

#include <numeric>
#include <tuple>

#include "comm/shm/thread_ranks.h"

namespace tessera::comm::shm {
namespace {

void sum_ints(void* out, const void* const* in, int count, size_t numel) {
  auto* result = static_cast<int*>(out);
  for (size_t i = 0; i < numel; ++i) {
    int sum = 0;
    for (int r = 0; r < count; ++r) {
      sum += static_cast<const int*>(in[r])[i];
    }
    result[i] = sum;
  }
}

constexpr Reduction kSum{&sum_ints, sizeof(int)};
constexpr size_t kSlot = 4096;

int value(int rank, size_t index) {
  return rank * 1'000'003 + static_cast<int>(index) * 7;
}

std::vector<int> values(int rank, size_t count) {
  std::vector<int> result(count);
  for (size_t i = 0; i < count; ++i) {
    result[i] = value(rank, i);
  }
  return result;
}

std::byte* bytes(std::vector<int>& data) {
  return reinterpret_cast<std::byte*>(data.data());
}

int sum_over_ranks(int size, size_t index) {
  int sum = 0;
  for (int rank = 0; rank < size; ++rank) {
    sum += value(rank, index);
  }
  return sum;
}

const std::byte* no_segments(uint64_t, uint64_t) {
  return nullptr;
}

/// (ranks, elements): below, at and above one slot, and none at all.
class CollectivesTest : public testing::TestWithParam<std::tuple<int, size_t>> {
 protected:
  int size() const {
    return std::get<0>(GetParam());
  }
  size_t count() const {
    return std::get<1>(GetParam());
  }
  void run(const std::function<void(Collectives&, int rank)>& body) const {
    ThreadRanks(size(), kSlot).run([&](Channel& channel) {
      Collectives collectives(channel, no_segments);
      // Twice: what the first left in the slots must not matter.
      body(collectives, channel.rank());
      body(collectives, channel.rank());
    });
  }
};

TEST_P(CollectivesTest, AllGatherGivesEveryRanksPart) {
  run([this](Collectives& collectives, int rank) {
    auto in = values(rank, count());
    std::vector<int> out(count() * static_cast<size_t>(size()));
    collectives.all_gather({}, bytes(in), bytes(out), count() * sizeof(int));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], value(static_cast<int>(i / count()), i % count()));
    }
  });
}

TEST_P(CollectivesTest, AllGatherInPlace) {
  run([this](Collectives& collectives, int rank) {
    std::vector<int> out(count() * static_cast<size_t>(size()));
    const size_t own = static_cast<size_t>(rank) * count();
    for (size_t i = 0; i < count(); ++i) {
      out[own + i] = value(rank, i);
    }
    collectives.all_gather(
        {}, bytes(out) + own * sizeof(int), bytes(out), count() * sizeof(int));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], value(static_cast<int>(i / count()), i % count()));
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterGivesTheOwnPartOfTheSum) {
  run([this](Collectives& collectives, int rank) {
    auto in = values(rank, count() * static_cast<size_t>(size()));
    std::vector<int> out(count());
    collectives.reduce_scatter(
        {}, bytes(in), bytes(out), count() * sizeof(int), kSum);
    for (size_t i = 0; i < count(); ++i) {
      const size_t index = static_cast<size_t>(rank) * count() + i;
      ASSERT_EQ(out[i], sum_over_ranks(size(), index));
    }
  });
}

TEST_P(CollectivesTest, AllReduceGivesTheSumEverywhere) {
  run([this](Collectives& collectives, int rank) {
    auto data = values(rank, count());
    collectives.all_reduce({}, bytes(data), count() * sizeof(int), kSum);
    for (size_t i = 0; i < count(); ++i) {
      ASSERT_EQ(data[i], sum_over_ranks(size(), i));
    }
  });
}

TEST_P(CollectivesTest, BroadcastGivesTheRootsDataEverywhere) {
  for (int root = 0; root < size(); ++root) {
    run([this, root](Collectives& collectives, int rank) {
      auto data = values(rank, count());
      collectives.broadcast({}, bytes(data), count() * sizeof(int), root);
      for (size_t i = 0; i < count(); ++i) {
        ASSERT_EQ(data[i], value(root, i));
      }
    });
  }
}

TEST_P(CollectivesTest, ReduceGivesTheSumToTheRootAlone) {
  for (int root = 0; root < size(); ++root) {
    run([this, root](Collectives& collectives, int rank) {
      auto data = values(rank, count());
      collectives.reduce({}, bytes(data), count() * sizeof(int), kSum, root);
      for (size_t i = 0; i < count(); ++i) {
        ASSERT_EQ(
            data[i], rank == root ? sum_over_ranks(size(), i) : value(rank, i));
      }
    });
  }
}

TEST_P(CollectivesTest, GatherGivesEveryRanksPartToTheRoot) {
  for (int root = 0; root < size(); ++root) {
    run([this, root](Collectives& collectives, int rank) {
      auto in = values(rank, count());
      std::vector<int> out(
          rank == root ? count() * static_cast<size_t>(size()) : 0);
      collectives.gather(
          {}, bytes(in), bytes(out), count() * sizeof(int), root);
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(out[i], value(static_cast<int>(i / count()), i % count()));
      }
    });
  }
}

TEST_P(CollectivesTest, ScatterGivesEachRankItsPartOfTheRoots) {
  for (int root = 0; root < size(); ++root) {
    run([this, root](Collectives& collectives, int rank) {
      auto in = values(
          root, rank == root ? count() * static_cast<size_t>(size()) : 0);
      std::vector<int> out(count());
      collectives.scatter(
          {}, bytes(in), bytes(out), count() * sizeof(int), root);
      for (size_t i = 0; i < count(); ++i) {
        ASSERT_EQ(out[i], value(root, static_cast<size_t>(rank) * count() + i));
      }
    });
  }
}

/// Rank r sends count * ((r + to) % 3) elements to rank `to`: some nothing.
TEST_P(CollectivesTest, AllToAllDeliversPartsOfDifferentSizes) {
  const auto part = [this](int from, int to) {
    return count() * static_cast<size_t>((from + to) % 3);
  };
  run([&](Collectives& collectives, int rank) {
    std::vector<std::vector<int>> in;
    std::vector<std::vector<int>> out;
    std::vector<Collectives::Spans> from;
    std::vector<Collectives::Spans> to;
    for (int peer = 0; peer < size(); ++peer) {
      in.push_back(values(rank * size() + peer, part(rank, peer)));
      out.emplace_back(part(peer, rank));
      // The sender's in one span, the receiver's in two.
      const size_t half = out.back().size() / 2 * sizeof(int);
      from.push_back({{bytes(in.back()), in.back().size() * sizeof(int)}});
      to.push_back(
          {{bytes(out.back()), half},
           {bytes(out.back()) + half, out.back().size() * sizeof(int) - half}});
    }
    collectives.all_to_all({}, from, to);
    for (int peer = 0; peer < size(); ++peer) {
      ASSERT_EQ(
          out[static_cast<size_t>(peer)],
          values(peer * size() + rank, part(peer, rank)));
    }
  });
}

TEST_P(CollectivesTest, AllToAllOfTheSameForEverybody) {
  run([&](Collectives& collectives, int rank) {
    auto in = values(rank, count() * static_cast<size_t>(rank + 1));
    std::vector<std::vector<int>> out;
    std::vector<Collectives::Spans> from;
    std::vector<Collectives::Spans> to;
    for (int peer = 0; peer < size(); ++peer) {
      out.emplace_back(count() * static_cast<size_t>(peer + 1));
      from.push_back({{bytes(in), in.size() * sizeof(int)}});
      to.push_back({{bytes(out.back()), out.back().size() * sizeof(int)}});
    }
    collectives.all_to_all({}, from, to);
    for (int peer = 0; peer < size(); ++peer) {
      const auto& got = out[static_cast<size_t>(peer)];
      ASSERT_EQ(got, values(peer, got.size()));
    }
  });
}

TEST_P(CollectivesTest, SharedInputsAreReadWhereTheyLie) {
  const size_t whole = count() * static_cast<size_t>(size());
  std::vector<int> shared(std::max<size_t>(whole, 1));
  ThreadRanks(size(), kSlot).run([&](Channel& channel) {
    Collectives collectives(channel, [&](uint64_t, uint64_t offset) {
      return bytes(shared) + offset;
    });
    const size_t own = static_cast<size_t>(channel.rank()) * count();
    for (size_t i = 0; i < count(); ++i) {
      shared[own + i] = value(channel.rank(), i);
    }
    Call call;
    call.segment = 1;
    call.offset = own * sizeof(int);
    std::vector<int> out(whole);
    collectives.all_gather(
        call,
        bytes(shared) + own * sizeof(int),
        bytes(out),
        count() * sizeof(int));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], value(static_cast<int>(i / count()), i % count()));
    }
    // All have read: writing now must not disturb anybody.
    for (size_t i = 0; i < count(); ++i) {
      shared[own + i] = -1;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    CollectivesTest,
    testing::Combine(
        testing::Values(1, 2, 3, 4),
        testing::Values<size_t>(0, 1, 7, 1023, 1024, 1025, 9000, 30000)));

} // namespace
} // namespace tessera::comm::shm
