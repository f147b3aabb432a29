// Pipes and messages, with ranks as threads: TSan sees all of them.
#include "comm/shm/message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>

#include "comm/shm/pipes.h"
#include "comm/shm/thread_ranks.h"

namespace tessera::comm::shm {
namespace {

using ::testing::HasSubstr;

/// Ranks as threads, each with a channel and pipes to the others.
class PipeRanks {
 public:
  explicit PipeRanks(
      int size,
      const Channel::Config& base = ThreadRanks::default_config())
      : ranks_(size, 4096, base),
        segment_(Segment::create(Pipes::bytes_needed(size))) {}

  void run(const std::function<void(Channel&, Pipes&)>& body) const {
    ranks_.run([&](Channel& channel) {
      Pipes pipes(segment_.data(), channel);
      body(channel, pipes);
    });
  }
  const ThreadRanks& ranks() const {
    return ranks_;
  }
  std::byte* memory() const {
    return segment_.data();
  }

 private:
  ThreadRanks ranks_;
  Segment segment_;
};

std::vector<uint8_t> contents(int seed, size_t bytes) {
  std::vector<uint8_t> result(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    result[i] = static_cast<uint8_t>(i * 31 + static_cast<size_t>(seed));
  }
  return result;
}

std::byte* raw(std::vector<uint8_t>& bytes) {
  return reinterpret_cast<std::byte*>(bytes.data());
}

Call call_of(const char* operation, size_t bytes) {
  Call call;
  assign(call.operation, operation);
  call.bytes = bytes;
  return call;
}

MessageRoute route(int me, int peer, int tag = 0) {
  return {.peer = peer, .tag = tag, .own_name = me, .peer_name = peer};
}

void send(Pipes& pipes, int me, int to, int tag, std::vector<uint8_t> data) {
  send_message(
      pipes, call_of("send", data.size()), route(me, to, tag), raw(data));
}

std::vector<uint8_t> receive(
    Pipes& pipes,
    int me,
    int from,
    int tag,
    size_t bytes) {
  std::vector<uint8_t> data(bytes);
  receive_message(
      pipes, call_of("recv", bytes), route(me, from, tag), raw(data));
  return data;
}

std::optional<ChannelError> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ChannelError& error) {
    return error;
  }
  return std::nullopt;
}

TEST(PipesTest, BytesArriveAsTheyWereSent) {
  // Below, at and above a packet and the whole pipe.
  PipeRanks(2).run([](Channel& channel, Pipes& pipes) {
    for (size_t bytes :
         {1ul, 7ul, 8ul, 65528ul, 65529ul, 262144ul, 262145ul, 3000001ul}) {
      if (channel.rank() == 0) {
        auto data = contents(3, bytes);
        pipes.send(1, 9, raw(data), bytes);
      } else {
        std::vector<uint8_t> data(bytes);
        pipes.receive(0, 9, raw(data), bytes);
        EXPECT_EQ(data, contents(3, bytes));
      }
    }
  });
}

TEST(PipesTest, CountersGoRoundTheirEnd) {
  const PipeRanks ranks(2);
  // As after almost 2^32 bytes from rank 0 to rank 1: `written` is the pipe's
  // first word, `read` the first of its second cache line.
  std::byte* pipe = ranks.memory() + Pipes::bytes_needed(2) / 4;
  constexpr uint32_t kNearTheEnd = 0u - 100'000;
  std::memcpy(pipe, &kNearTheEnd, sizeof kNearTheEnd);
  std::memcpy(pipe + 64, &kNearTheEnd, sizeof kNearTheEnd);
  ranks.run([](Channel& channel, Pipes& pipes) {
    for (int round = 0; round < 20; ++round) {
      const size_t bytes = 50'003;
      if (channel.rank() == 0) {
        auto data = contents(round, bytes);
        pipes.send(1, 0, raw(data), bytes);
      } else {
        std::vector<uint8_t> data(bytes);
        pipes.receive(0, 0, raw(data), bytes);
        EXPECT_EQ(data, contents(round, bytes)) << round;
      }
    }
  });
  uint32_t written = 0;
  std::memcpy(&written, pipe, sizeof written);
  EXPECT_LT(written, kNearTheEnd); // they did
}

TEST(PipesTest, AStreamThatNobodyReadsBlocksNoOther) {
  PipeRanks(2).run([](Channel& channel, Pipes& pipes) {
    constexpr int kStreams = 500; // more than the pipe holds
    constexpr size_t kBytes = 1000;
    for (int i = 0; i < kStreams; ++i) {
      if (channel.rank() == 0) {
        auto data = contents(i, kBytes);
        pipes.send(1, static_cast<uint32_t>(i), raw(data), kBytes);
      } else { // the last first
        const int stream = kStreams - 1 - i;
        std::vector<uint8_t> data(kBytes);
        pipes.receive(0, static_cast<uint32_t>(stream), raw(data), kBytes);
        EXPECT_EQ(data, contents(stream, kBytes));
      }
    }
  });
}

TEST(PipesTest, ThreadsOfARankWaitForDifferentStreams) {
  PipeRanks(2).run([](Channel& channel, Pipes& pipes) {
    constexpr int kThreads = 4;
    constexpr int kRounds = 200;
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const auto stream = static_cast<uint32_t>(i);
        const size_t bytes = 1 + static_cast<size_t>(i) * 40'000;
        std::vector<uint8_t> data(bytes);
        for (int round = 0; round < kRounds; ++round) {
          if (channel.rank() == 0) {
            data = contents(i + round, bytes);
            pipes.send(1, stream, raw(data), bytes);
            pipes.receive(1, stream, raw(data), bytes);
          } else {
            pipes.receive(0, stream, raw(data), bytes);
            pipes.send(0, stream, raw(data), bytes);
          }
          ASSERT_EQ(data, contents(i + round, bytes));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(PipesTest, ManyRanksHaveSmallerPipes) {
  EXPECT_LE(Pipes::bytes_needed(8), 17u << 20);
  EXPECT_LE(Pipes::bytes_needed(16), 17u << 20);
  EXPECT_LE(Pipes::bytes_needed(256), 1100u << 20);
}

TEST(MessageTest, MessagesOfOneTagArriveInOrderAndOthersInAnyOrder) {
  PipeRanks(2).run([](Channel& channel, Pipes& pipes) {
    const int me = channel.rank();
    // Each tag has a thread, as lanes have: the tags are taken in the opposite
    // order.
    std::vector<std::thread> senders;
    for (int tag = 0; me == 0 && tag < 3; ++tag) {
      senders.emplace_back([&pipes, tag] {
        for (int i = 0; i < 5; ++i) {
          send(pipes, 0, 1, tag, contents(tag * 10 + i, 100'000));
        }
      });
    }
    for (int tag = 2; me == 1 && tag >= 0; --tag) {
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(
            receive(pipes, 1, 0, tag, 100'000),
            contents(tag * 10 + i, 100'000));
      }
    }
    for (std::thread& sender : senders) {
      sender.join();
    }
  });
}

TEST(MessageTest, AMessageOfAnotherSizeIsAnErrorOnBothSides) {
  std::vector<std::string> texts(2);
  PipeRanks(2).run([&](Channel& channel, Pipes& pipes) {
    const int me = channel.rank();
    const auto error = error_of([&] {
      if (me == 0) {
        send(pipes, 0, 1, 5, contents(0, 12));
      } else {
        receive(pipes, 1, 0, 5, 16);
      }
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ChannelError::Kind::Mismatch);
    texts[static_cast<size_t>(me)] = error->what();
    // Both go on.
    if (me == 0) {
      send(pipes, 0, 1, 5, contents(1, 16));
    } else {
      EXPECT_EQ(receive(pipes, 1, 0, 5, 16), contents(1, 16));
    }
  });
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_THAT(texts[0], HasSubstr("rank 0: send (12 bytes)"));
  EXPECT_THAT(texts[0], HasSubstr("rank 1: recv (16 bytes)"));
}

TEST(MessageTest, EveryRankSendsToEveryOtherAtOnce) {
  for (int size : {2, 3, 4}) {
    PipeRanks(size).run([size](Channel& channel, Pipes& pipes) {
      const int me = channel.rank();
      const auto bytes_from = [](int from, int to, int round) {
        std::mt19937 random(
            static_cast<unsigned>(from * 100 + to * 10 + round));
        return static_cast<size_t>(random() % 400'000);
      };
      std::vector<std::thread> senders;
      for (int to = 0; to < size; ++to) {
        if (to != me) {
          senders.emplace_back([&, to] {
            for (int round = 0; round < 4; ++round) {
              send(pipes, me, to, 0, contents(me, bytes_from(me, to, round)));
            }
          });
        }
      }
      for (int from = 0; from < size; ++from) {
        for (int round = 0; from != me && round < 4; ++round) {
          const size_t bytes = bytes_from(from, me, round);
          EXPECT_EQ(receive(pipes, me, from, 0, bytes), contents(from, bytes));
        }
      }
      for (std::thread& sender : senders) {
        sender.join();
      }
    });
  }
}

TEST(MessageTest, APeerThatNeverSendsIsNamedAtTheTimeout) {
  auto config = ThreadRanks::default_config();
  config.patience.timeout = std::chrono::milliseconds(150);
  config.names = {4, 5};
  const PipeRanks ranks(2, config);
  const auto channel = ranks.ranks().channel(0);
  const auto silent = ranks.ranks().channel(1);
  Pipes pipes(ranks.memory(), *channel);
  const auto error = error_of([&] { receive(pipes, 0, 1, 0, 8); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ChannelError::Kind::Timeout);
  EXPECT_THAT(error->what(), HasSubstr("rank 5 did not come"));
  // The channel is dead, for collectives too, and says of what.
  const auto next = error_of([&] {
    channel->begin_step();
    channel->publish();
    channel->wait_for_all();
  });
  ASSERT_TRUE(next.has_value());
  EXPECT_THAT(next->what(), HasSubstr("rank 5 did not come"));
}

TEST(MessageTest, TrafficOfOtherTagsGivesNoMoreTime) {
  auto config = ThreadRanks::default_config();
  config.patience.timeout = std::chrono::milliseconds(300);
  std::atomic<bool> timed_out{false};
  PipeRanks(2, config).run([&](Channel& channel, Pipes& pipes) {
    std::vector<uint8_t> one(1);
    if (channel.rank() == 1) {
      // The errors begin when rank 0 has given up.
      error_of([&] {
        while (!timed_out) {
          pipes.send(0, 7, raw(one), 1); // never a moment without traffic
        }
      });
      return;
    }
    const auto error = error_of([&] { receive(pipes, 0, 1, 0, 8); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ChannelError::Kind::Timeout);
    timed_out = true;
  });
}

TEST(MessageTest, APeerThatDiedOrLeftIsNamedBeforeTheTimeout) {
  auto config = ThreadRanks::default_config();
  {
    config.is_alive = [](int peer) { return peer != 1; };
    const PipeRanks ranks(2, config);
    const auto channel = ranks.ranks().channel(0);
    const auto silent = ranks.ranks().channel(1);
    Pipes pipes(ranks.memory(), *channel);
    const auto error = error_of([&] { receive(pipes, 0, 1, 0, 8); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ChannelError::Kind::PeerLost);
    EXPECT_THAT(error->what(), HasSubstr("rank 1 died"));
  }
  const PipeRanks ranks(2);
  const auto channel = ranks.ranks().channel(0);
  ranks.ranks().channel(1).reset();
  Pipes pipes(ranks.memory(), *channel);
  const auto error =
      error_of([&] { send(pipes, 0, 1, 0, contents(0, 1'000'000)); });
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), HasSubstr("rank 1 has left the group"));
}

TEST(MessageTest, BytesThatWereSentBeforeADeathAreStillRead) {
  auto config = ThreadRanks::default_config();
  config.is_alive = [](int) { return false; };
  const PipeRanks ranks(2, config);
  const auto channel = ranks.ranks().channel(0);
  auto data = contents(2, 1000);
  {
    const auto other = ranks.ranks().channel(1);
    Pipes(ranks.memory(), *other).send(0, 0, raw(data), data.size());
  }
  Pipes pipes(ranks.memory(), *channel);
  std::vector<uint8_t> got(data.size());
  EXPECT_NO_THROW(pipes.receive(1, 0, raw(got), got.size()));
  EXPECT_EQ(got, data);
}

TEST(MessageTest, AnAbortEndsAWait) {
  const PipeRanks ranks(2);
  const auto channel = ranks.ranks().channel(0);
  const auto silent = ranks.ranks().channel(1);
  Pipes pipes(ranks.memory(), *channel);
  std::thread aborter([&] { channel->abort("enough"); });
  const auto error = error_of([&] { receive(pipes, 0, 1, 0, 8); });
  aborter.join();
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ChannelError::Kind::Aborted);
  EXPECT_THAT(error->what(), HasSubstr("enough"));
}

} // namespace
} // namespace tessera::comm::shm
