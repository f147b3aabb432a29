// Messages between two ranks, and the collectives of one root.
#include <tessera/comm/group.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <chrono>
#include <numeric>
#include <random>

#include "comm/group/group_impl.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Groups of these tests time out after 20 s.
constexpr std::chrono::seconds kLongBelowTimeout{12};

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

at::Tensor numbers(int seed, int64_t count, at::ScalarType dtype = at::kFloat) {
  // Small enough that sums over ranks are exact in every dtype.
  return ((torch::arange(count) + seed) % 5).to(dtype);
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      at::equal(a.to(at::kComplexDouble), b.to(at::kComplexDouble));
}

template <class E = DisagreementError>
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class MessageTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(
        RanksOptions{
            .size = std::get<1>(GetParam()),
            .backend = std::get<0>(GetParam())},
        body);
  }
  /// Only where there are two ranks or more: a message needs a pair.
  void run_pairs(const std::function<void(const Group&)>& body) const {
    run([&](const Group& world) {
      if (world.size() > 1) {
        body(world);
      }
    });
  }
};

TEST_P(MessageTest, EveryDtypeArrives) {
  run_pairs([](const Group& world) {
    const int last = world.size() - 1;
    for (auto dtype : kMovable) {
      SCOPED_TRACE(c10::toString(dtype));
      for (int64_t count : {0, 1, 7, 1000, 300'001}) {
        if (world.rank() == 0) {
          world.send(numbers(3, count, dtype), last, 4, "halo");
        } else if (world.rank() == last) {
          auto tensor = torch::zeros({count}, dtype);
          world.recv(tensor, 0, 4, "halo");
          EXPECT_TRUE(same(tensor, numbers(3, count, dtype)));
        }
      }
    }
  });
}

TEST_P(MessageTest, TwoRanksOfManyNeedNobodyElse) {
  run_pairs([](const Group& world) {
    // Ranks 2 and 3 come to the barrier at once: no call of theirs has a part
    // in the messages, nor in making what messages need.
    auto ball = torch::full({3}, 0.0f);
    for (int i = 0; world.rank() < 2 && i < 50; ++i) {
      if ((world.rank() + i) % 2 == 0) {
        ball += 1;
        world.send(ball, 1 - world.rank());
      } else {
        world.recv(ball, 1 - world.rank());
        EXPECT_EQ(ball[2].item<float>(), i + 1);
      }
    }
    world.barrier();
  });
}

TEST_P(MessageTest, ARingOfAsynchronousMessages) {
  run_pairs([](const Group& world) {
    const int n = world.size();
    const int next = (world.rank() + 1) % n;
    const int previous = (world.rank() + n - 1) % n;
    for (int64_t count : {5, 500'000}) {
      auto mine = numbers(world.rank(), count);
      auto theirs = torch::empty({count});
      auto receive = world.recv_async(theirs, previous);
      auto send = world.send_async(mine, next);
      send.wait();
      receive.wait();
      EXPECT_TRUE(send.done());
      EXPECT_TRUE(same(theirs, numbers(previous, count)));
      // Both at once, without asynchronous receiving.
      auto again = world.send_async(mine, next, 1);
      world.recv(theirs, previous, 1);
      again.wait();
      EXPECT_TRUE(same(theirs, numbers(previous, count)));
    }
  });
}

TEST_P(MessageTest, TagsMayBeReceivedInAnyOrderAndOneTagInItsOwn) {
  run_pairs([](const Group& world) {
    std::vector<Work> sends;
    if (world.rank() == 0) {
      for (int tag = 0; tag < 4; ++tag) {
        for (int i = 0; i < 3; ++i) {
          sends.push_back(
              world.send_async(torch::full({1000}, tag * 10.0f + i), 1, tag));
        }
      }
    } else if (world.rank() == 1) {
      for (int tag = 3; tag >= 0; --tag) {
        for (int i = 0; i < 3; ++i) {
          auto tensor = torch::empty({1000});
          world.recv(tensor, 0, tag);
          EXPECT_EQ(tensor[999].item<float>(), tag * 10.0f + i);
        }
      }
    }
    for (Work& send : sends) {
      send.wait();
    }
    world.barrier();
  });
}

TEST_P(MessageTest, CollectivesGoOnWhileAMessageWaits) {
  run_pairs([](const Group& world) {
    auto late = torch::zeros({10});
    Work receive;
    if (world.rank() == 0) {
      receive = world.recv_async(late, 1);
    }
    auto sum = torch::ones({100});
    world.all_reduce(sum);
    EXPECT_EQ(sum[0].item<float>(), world.size());
    if (world.rank() == 1) {
      world.send(torch::ones({10}), 0);
    }
    // Nobody waits for this one yet, and yet it progresses.
    Work forgotten;
    if (world.rank() == 1) {
      forgotten = world.send_async(torch::full({300'000}, 7.0f), 0, 3);
    }
    if (world.rank() == 0) {
      auto taken = torch::zeros({300'000});
      world.recv(taken, 1, 3);
      EXPECT_EQ(taken.sum().item<float>(), 2'100'000);
      receive.wait();
      EXPECT_EQ(late.sum().item<float>(), 10);
    }
    world.all_reduce(sum);
    forgotten.wait();
  });
}

TEST_P(MessageTest, RandomMessagesAreThoseThatWereSent) {
  run_pairs([](const Group& world) {
    // All ranks draw the same plan; each does its part, in its own order.
    struct Planned {
      int from, to, tag;
      int64_t count;
      int seed;
    };
    std::mt19937 random(7);
    std::vector<Planned> plan;
    for (int i = 0; i < 60; ++i) {
      const auto n = static_cast<unsigned>(world.size());
      const int from = static_cast<int>(random() % n);
      const int to = static_cast<int>(
          (static_cast<unsigned>(from) + 1 + random() % (n - 1)) % n);
      plan.push_back(
          {from,
           to,
           static_cast<int>(random() % 3),
           static_cast<int64_t>(random() % 60'000),
           i});
    }
    std::vector<std::pair<Work, at::Tensor>> sends;
    std::vector<std::tuple<Work, at::Tensor, int>> receives;
    for (const Planned& message : plan) {
      if (message.from == world.rank()) {
        auto tensor = numbers(message.seed, message.count);
        sends.emplace_back(
            world.send_async(tensor, message.to, message.tag), tensor);
      }
      if (message.to == world.rank()) {
        auto tensor = torch::full({message.count}, -1.0f);
        receives.emplace_back(
            world.recv_async(tensor, message.from, message.tag),
            tensor,
            message.seed);
      }
    }
    std::shuffle(receives.begin(), receives.end(), random);
    for (auto& [work, tensor, seed] : receives) {
      work.wait();
      EXPECT_TRUE(same(tensor, numbers(seed, tensor.numel())));
    }
    for (auto& [work, tensor] : sends) {
      work.wait();
    }
  });
}

TEST_P(MessageTest, WhatDoesNotFitIsAnErrorOnBothSides) {
  run_pairs([](const Group& world) {
    const auto both = [&](const at::Tensor& sent,
                          const at::Tensor& expected,
                          const char* label = "") {
      if (world.rank() > 1) {
        return std::string();
      }
      return error_of([&] {
        if (world.rank() == 0) {
          world.send(sent, 1, 2, label);
        } else {
          world.recv(expected, 0, 2, "weights");
        }
      });
    };
    const auto expect = [&](const std::string& text, const auto& matcher) {
      if (world.rank() < 2) {
        EXPECT_THAT(text, matcher);
      }
    };
    expect(
        both(torch::ones({4}), torch::ones({5}), "weights"),
        AllOf(
            HasSubstr("rank 0: send of Float [4] to rank 1, tag 2 (16 bytes)"),
            HasSubstr(
                "rank 1: recv of Float [5] from rank 0, tag 2 (20 bytes)")));
    // As many bytes of another dtype, and another label.
    expect(
        both(torch::ones({4}, at::kInt), torch::full({4}, 9.0f), "weights"),
        HasSubstr("rank 0: send of Int [4]"));
    expect(
        both(torch::ones({4}), torch::ones({4}), "biases"),
        HasSubstr("for \"biases\""));
    // Large ones too: nothing of them is sent.
    expect(
        both(torch::ones({900'000}), torch::ones({3}), "weights"),
        HasSubstr("3600000 bytes"));
    // The group stays usable, and the tag too. Shapes may differ.
    if (world.rank() == 0) {
      world.send(torch::ones({2, 3}), 1, 2);
    } else if (world.rank() == 1) {
      auto tensor = torch::zeros({6});
      world.recv(tensor, 0, 2);
      EXPECT_EQ(tensor.sum().item<float>(), 6);
    }
    auto sum = torch::ones({1});
    world.all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), world.size());
  });
}

TEST_P(MessageTest, AnAsynchronousMisfitComesWithWait) {
  run_pairs([](const Group& world) {
    Work work;
    if (world.rank() == 0) {
      work = world.send_async(torch::ones({4}), 1);
    } else if (world.rank() == 1) {
      work = world.recv_async(torch::ones({5}), 0);
    }
    if (world.rank() < 2) {
      EXPECT_THAT(
          error_of([&] { work.wait(); }), HasSubstr("not what the receiver"));
    }
    world.barrier();
  });
}

TEST_P(MessageTest, RefusesPeersAndTagsThatAreNotThere) {
  run([](const Group& world) {
    const auto tensor = torch::ones({2});
    const int n = world.size();
    for (int peer : {-1, n, world.rank()}) {
      EXPECT_THAT(
          error_of<c10::ValueError>([&] { world.send(tensor, peer); }),
          HasSubstr("the peer is rank " + std::to_string(peer)));
      EXPECT_THAT(
          error_of<c10::ValueError>([&] { world.recv(tensor, peer); }),
          HasSubstr("[recv]"));
    }
    if (n > 1) {
      const int peer = world.rank() == 0 ? 1 : 0;
      for (int tag : {-1, 1 << 28}) {
        EXPECT_THAT(
            error_of<c10::ValueError>([&] { world.send(tensor, peer, tag); }),
            HasSubstr("tag " + std::to_string(tag) + " is not a number"));
      }
      EXPECT_THAT(
          error_of<c10::ValueError>([&] {
            world.send(torch::ones({2, 2}).t(), peer);
          }),
          HasSubstr("not dense and contiguous"));
    }
    // Nothing was sent, and a part in a message of the largest tag still works.
    if (n > 1 && world.rank() == 0) {
      world.send(tensor, 1, (1 << 28) - 1);
    } else if (world.rank() == 1) {
      auto received = torch::zeros({2});
      world.recv(received, 0, (1 << 28) - 1);
      EXPECT_TRUE(same(received, tensor));
    }
    world.barrier();
  });
}

TEST_P(MessageTest, PeersCountWithinTheGroup) {
  run_pairs([](const Group& world) {
    const auto reversed = world.split(0, -world.rank());
    auto tensor = torch::full({1}, world.rank() * 1.0f);
    if (reversed->rank() == 0) {
      reversed->send(tensor, 1);
    } else if (reversed->rank() == 1) {
      reversed->recv(tensor, 0);
      EXPECT_EQ(tensor.item<float>(), world.size() - 1);
    }
  });
}

TEST_P(MessageTest, GatherBringsEveryDtypeToEveryRoot) {
  run([](const Group& world) {
    const int n = world.size();
    for (int root = 0; root < n; ++root) {
      for (auto dtype : kMovable) {
        SCOPED_TRACE(c10::toString(dtype));
        for (int64_t count : {0, 1, 7, 1000}) {
          const auto output = world.rank() == root
              ? torch::zeros({n, count}, dtype)
              : at::Tensor();
          world.gather(output, numbers(world.rank(), count, dtype), root);
          for (int peer = 0; peer < n && world.rank() == root; ++peer) {
            EXPECT_TRUE(same(output[peer], numbers(peer, count, dtype)));
          }
        }
      }
      // In place, and larger than a slot.
      constexpr int64_t kCount = 700'001;
      auto whole = torch::full({n, kCount}, -1.0f);
      auto part = whole[world.rank()];
      part.copy_(numbers(world.rank(), kCount));
      world.gather(world.rank() == root ? whole : at::Tensor(), part, root);
      for (int peer = 0; peer < n && world.rank() == root; ++peer) {
        EXPECT_TRUE(same(whole[peer], numbers(peer, kCount)));
      }
    }
  });
}

TEST_P(MessageTest, ScatterBringsEachRankItsPart) {
  run([](const Group& world) {
    const int n = world.size();
    for (int root = 0; root < n; ++root) {
      const auto part_of = [&](const at::Tensor& all, int64_t count) {
        return all.narrow(0, world.rank() * count, count);
      };
      for (auto dtype : kMovable) {
        SCOPED_TRACE(c10::toString(dtype));
        for (int64_t count : {0, 1, 7, 1000}) {
          const auto all = numbers(root, n * count, dtype);
          auto output = torch::zeros({count}, dtype);
          world.scatter(
              output, world.rank() == root ? all : at::Tensor(), root);
          EXPECT_TRUE(same(output, part_of(all, count)));
        }
      }
      constexpr int64_t kCount = 700'001;
      auto all = numbers(root, n * kCount);
      auto output =
          world.rank() == root ? part_of(all, kCount) : torch::zeros({kCount});
      world.scatter(output, world.rank() == root ? all : at::Tensor(), root);
      EXPECT_TRUE(same(output, part_of(numbers(root, n * kCount), kCount)));
    }
  });
}

TEST_P(MessageTest, ReduceGivesTheRootWhatAllReduceGives) {
  run([](const Group& world) {
    const int n = world.size();
    for (auto op :
         {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
      for (auto dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
        if (op == ReduceOp::Avg && dtype == at::kLong) {
          continue;
        }
        SCOPED_TRACE(c10::toString(dtype));
        for (int64_t count : {0, 5, 400'000}) {
          for (int root = 0; root < n; ++root) {
            auto expected = numbers(world.rank(), count, dtype);
            world.all_reduce(expected, op);
            auto tensor = numbers(world.rank(), count, dtype);
            world.reduce(tensor, root, op);
            EXPECT_TRUE(same(
                tensor,
                world.rank() == root ? expected
                                     : numbers(world.rank(), count, dtype)));
          }
        }
      }
    }
    auto flags = torch::tensor({true, world.rank() == 0, false});
    world.reduce(flags, 0);
    if (world.rank() == 0) {
      EXPECT_TRUE(same(flags, torch::tensor({true, true, false})));
    }
  });
}

TEST_P(MessageTest, TheCollectivesOfARootAreAsynchronousToo) {
  run([](const Group& world) {
    const int n = world.size();
    const bool is_root = world.rank() == 0;
    auto gathered = is_root ? torch::zeros({n, 10}) : at::Tensor();
    auto mine = numbers(world.rank(), 10);
    auto reduced = torch::ones({1000});
    auto scattered = torch::zeros({2});
    auto gather = world.gather_async(gathered, mine, 0);
    auto reduce = world.reduce_async(reduced, 0, ReduceOp::Avg);
    auto scatter = world.scatter_async(
        scattered,
        is_root ? torch::arange(2 * n).to(at::kFloat) : at::Tensor(),
        0);
    scatter.wait();
    EXPECT_EQ(scattered[1].item<float>(), 2.0f * world.rank() + 1);
    gather.wait();
    reduce.wait();
    EXPECT_TRUE(same(reduced, torch::ones({1000})));
    for (int peer = 0; peer < n && is_root; ++peer) {
      EXPECT_TRUE(same(gathered[peer], numbers(peer, 10)));
    }
  });
}

TEST_P(MessageTest, ARootsWrongTensorIsAnErrorOnEveryRank) {
  run([](const Group& world) {
    const int n = world.size();
    const bool is_root = world.rank() == n - 1;
    const auto expect = [&](const std::function<void()>& body,
                            const char* own) {
      if (is_root) {
        EXPECT_THAT(error_of<c10::ValueError>(body), HasSubstr(own));
      } else {
        EXPECT_THAT(error_of(body), HasSubstr("rank " + std::to_string(n - 1)));
      }
    };
    expect(
        [&] {
          world.gather(
              is_root ? torch::zeros({n, 4}) : at::Tensor(),
              torch::ones({3}),
              n - 1);
        },
        "output has");
    expect(
        [&] { world.gather(at::Tensor(), torch::ones({3}), n - 1); },
        "output is an undefined tensor");
    expect(
        [&] {
          world.scatter(
              torch::ones({3}),
              is_root ? torch::zeros({n, 3}, at::kDouble) : at::Tensor(),
              n - 1);
        },
        "input is Double on cpu");
    auto sum = torch::ones({1});
    world.all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), n);
  });
}

TEST_P(MessageTest, RootsAndShapesThatDifferAreShownOnEveryRank) {
  run_pairs([](const Group& world) {
    const bool differs = world.rank() == 1;
    EXPECT_THAT(
        error_of([&] { world.reduce(torch::ones({4}), differs ? 1 : 0); }),
        AllOf(HasSubstr("SUM root 0"), HasSubstr("rank 1: reduce of Float")));
    EXPECT_THAT(
        error_of([&] {
          world.gather(
              world.rank() == 0 ? torch::zeros({world.size(), 4})
                                : at::Tensor(),
              torch::ones({differs ? 5 : 4}),
              0);
        }),
        HasSubstr("rank 1: gather of Float [5] root 0"));
    EXPECT_THAT(
        error_of<c10::ValueError>(
            [&] { world.reduce(torch::ones({4}), world.size()); }),
        HasSubstr("root is"));
  });
}

std::string backend_and_size(
    const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    Backends,
    MessageTest,
    ::testing::Combine(
        ::testing::Values("shm", "gloo"),
        ::testing::Values(1, 2, 3, 4)),
    backend_and_size);

TEST(SharedMemoryMessageTest, AGroupThatIsDroppedEndsItsMessages) {
  for (const char* backend : {"shm", "gloo"}) {
    on_ranks(
        RanksOptions{.size = 2, .backend = backend}, [](const Group& world) {
          Work never;
          {
            const auto group = world.split(0, world.rank());
            never = group->recv_async(torch::ones({3}), 1 - world.rank(), 5);
            group->barrier();
          }
          // The work holds the group: it is dropped with the work.
          const auto begin = std::chrono::steady_clock::now();
          never = Work();
          EXPECT_LT(
              std::chrono::steady_clock::now() - begin, kLongBelowTimeout);
          world.barrier();
        });
  }
}

TEST(MessageFailureTest, AMessageUnderWayEndsWithTheGroupAndItsFirstReason) {
  for (const char* backend : {"shm", "gloo"}) {
    on_ranks(
        RanksOptions{.size = 2, .backend = backend}, [](const Group& world) {
          const auto group = world.split(0, world.rank());
          Work never = group->recv_async(torch::ones({3}), 1 - world.rank(), 5);
          group->barrier();
          const auto begin = std::chrono::steady_clock::now();
          group->impl().give_up("the disk is full");
          EXPECT_THAT(
              error_of<PeerLostError>([&] { never.wait(); }),
              HasSubstr("the disk is full"));
          EXPECT_LT(
              std::chrono::steady_clock::now() - begin, kLongBelowTimeout);
          EXPECT_THAT(
              error_of<PeerLostError>([&] { group->barrier(); }),
              HasSubstr("the disk is full"));
          world.barrier();
        });
  }
}

TEST(MessageFailureTest, ATagOfTesseraIsRefusedInC10dsOwnMessages) {
  on_ranks(RanksOptions{.size = 2, .backend = "gloo"}, [](const Group& world) {
    std::vector<at::Tensor> tensors{torch::ones({1})};
    EXPECT_THAT(
        error_of<c10::ValueError>([&] {
          world.impl().carrier(at::kCPU)->backend()->send(
              tensors, 1 - world.rank(), 1 << 30);
        }),
        HasSubstr("2^30"));
  });
}

TEST(FakeMessageTest, MessagesOfPeersThatAreNotThere) {
  const Group world =
      init(InitOptions().backend("fake").rank(3).world_size(64).local_rank(0));
  auto tensor = torch::ones({3});
  world.send(tensor, 5);
  world.recv_async(tensor, 5).wait();
  EXPECT_EQ(tensor.sum().item<float>(), 3);
  auto gathered = torch::zeros({64, 3});
  world.gather(gathered, tensor, 3);
  EXPECT_EQ(gathered.sum().item<float>(), 192);
  world.gather(at::Tensor(), tensor, 0);
  auto part = torch::zeros({1});
  world.scatter(part, torch::arange(64).to(at::kFloat), 3);
  EXPECT_EQ(part.item<float>(), 3);
  world.reduce(tensor, 3);
  EXPECT_EQ(tensor.sum().item<float>(), 3);
  shutdown();
}

} // namespace
} // namespace tessera
