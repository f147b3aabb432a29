#include "comm/shm/channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>

#include "base/fnv.h"
#include "comm/shm/thread_ranks.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

Call make_call(const char* operation, uint64_t bytes) {
  Call call;
  assign(call.operation, operation);
  call.digest = mix_digest(0, operation);
  call.bytes = bytes;
  return call;
}

ChannelError::Kind kind_of(
    const std::function<void()>& body,
    std::string* what) {
  try {
    body();
  } catch (const ChannelError& error) {
    *what = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ChannelError::Kind::Aborted;
}

TEST(ChannelTest, EveryRankReadsEveryStepOfEveryPeer) {
  constexpr int kSize = 4;
  constexpr int kSteps = 500;
  ThreadRanks(kSize, 4096).run([](Channel& channel) {
    for (int step = 0; step < kSteps; ++step) {
      *reinterpret_cast<int*>(channel.begin_step()) =
          step * kSize + channel.rank();
      channel.publish();
      for (int peer = 0; peer < kSize; ++peer) {
        const int seen = *reinterpret_cast<const int*>(channel.wait_for(peer));
        ASSERT_EQ(seen, step * kSize + peer);
      }
    }
  });
}

TEST(ChannelTest, SpinningRanksAgreeToo) {
  auto config = ThreadRanks::default_config();
  config.patience.spin = std::chrono::microseconds(200);
  std::atomic<int> sum{0};
  ThreadRanks(2, 4096, config).run([&](Channel& channel) {
    for (int step = 0; step < 200; ++step) {
      *reinterpret_cast<int*>(channel.begin_step()) = step;
      channel.publish();
      sum +=
          *reinterpret_cast<const int*>(channel.wait_for(1 - channel.rank()));
    }
  });
  EXPECT_EQ(sum, 2 * 199 * 200 / 2);
}

TEST(ChannelTest, TimeoutNamesTheMissingRank) {
  auto config = ThreadRanks::default_config();
  config.patience.timeout = milliseconds(150);
  config.names = {4, 5, 6};
  std::latch timed_out(2);
  ThreadRanks(3, 4096, config).run([&](Channel& channel) {
    if (channel.rank() == 2) {
      timed_out.wait(); // leaves only after the others
      return;
    }
    channel.begin_step();
    channel.publish();
    std::string what;
    const auto kind = kind_of([&] { channel.wait_for_all(); }, &what);
    EXPECT_EQ(kind, ChannelError::Kind::Timeout);
    EXPECT_THAT(what, HasSubstr("rank 6 did not come"));
    EXPECT_THAT(what, HasSubstr("timed out after "));
    timed_out.count_down();
  });
}

TEST(ChannelTest, ALateRankLearnsThatTheOthersGaveUp) {
  auto config = ThreadRanks::default_config();
  config.patience.timeout = milliseconds(100);
  std::latch gave_up(1);
  std::latch learned(1);
  ThreadRanks(2, 4096, config).run([&](Channel& channel) {
    std::string what;
    if (channel.rank() == 1) {
      gave_up.wait();
      channel.begin_step();
      channel.publish();
      channel.wait_for_all(); // rank 0 had published this step
      const auto kind = kind_of(
          [&] {
            channel.begin_step();
            channel.publish();
            channel.wait_for_all();
          },
          &what);
      EXPECT_EQ(kind, ChannelError::Kind::PeerLost);
      EXPECT_THAT(what, HasSubstr("rank 0 gave this group up: timed out"));
      learned.count_down();
      return;
    }
    channel.begin_step();
    channel.publish();
    kind_of([&] { channel.wait_for_all(); }, &what);
    gave_up.count_down();
    learned.wait();
  });
}

TEST(ChannelTest, ADeadChannelRefusesFurtherSteps) {
  auto config = ThreadRanks::default_config();
  config.patience.timeout = milliseconds(50);
  const ThreadRanks ranks(2, 4096, config);
  const auto channel = ranks.channel(0);
  std::string what;
  channel->begin_step();
  channel->publish();
  kind_of([&] { channel->wait_for_all(); }, &what);
  EXPECT_EQ(
      kind_of([&] { channel->begin_step(); }, &what),
      ChannelError::Kind::PeerLost);
  EXPECT_THAT(what, HasSubstr("failed earlier"));
}

TEST(ChannelTest, APeerThatLeftIsNamedAtOnce) {
  const ThreadRanks ranks(2, 4096);
  const auto channel = ranks.channel(0);
  ranks.channel(1).reset();
  channel->begin_step();
  channel->publish();
  std::string what;
  EXPECT_EQ(
      kind_of([&] { channel->wait_for_all(); }, &what),
      ChannelError::Kind::PeerLost);
  EXPECT_THAT(what, HasSubstr("rank 1 has left the group"));
}

TEST(ChannelTest, ADeadPeerIsNamedBeforeTheTimeout) {
  auto config = ThreadRanks::default_config();
  config.is_alive = [](int peer) { return peer != 1; };
  const ThreadRanks ranks(2, 4096, config);
  const auto channel = ranks.channel(0);
  const auto silent = ranks.channel(1); // never publishes
  channel->begin_step();
  channel->publish();
  std::string what;
  EXPECT_EQ(
      kind_of([&] { channel->wait_for_all(); }, &what),
      ChannelError::Kind::PeerLost);
  EXPECT_THAT(what, HasSubstr("rank 1 died"));
}

TEST(ChannelTest, APeerThatDiedAfterPublishingIsStillRead) {
  auto config = ThreadRanks::default_config();
  config.is_alive = [](int) { return false; };
  const ThreadRanks ranks(2, 4096, config);
  const auto channel = ranks.channel(0);
  {
    const auto other = ranks.channel(1);
    other->begin_step();
    other->publish();
  }
  channel->begin_step();
  channel->publish();
  EXPECT_NO_THROW(channel->wait_for_all());
}

TEST(ChannelTest, AbortEndsAWaitFromAnotherThread) {
  const ThreadRanks ranks(2, 4096);
  const auto channel = ranks.channel(0);
  const auto silent = ranks.channel(1);
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(30));
    channel->abort("enough");
  });
  channel->begin_step();
  channel->publish();
  std::string what;
  EXPECT_EQ(
      kind_of([&] { channel->wait_for_all(); }, &what),
      ChannelError::Kind::Aborted);
  aborter.join();
}

TEST(ChannelTest, MismatchedCallsThrowTheSameTextOnEveryRank) {
  std::vector<std::string> texts(3);
  ThreadRanks(3, 4096).run([&](Channel& channel) {
    const int rank = channel.rank();
    const Call call = rank == 1 ? make_call("all_reduce", 8)
                                : make_call("all_gather_into", 8);
    channel.begin_step();
    channel.publish(&call);
    channel.wait_for_all();
    EXPECT_EQ(
        kind_of(
            [&] { channel.check_calls(); }, &texts[static_cast<size_t>(rank)]),
        ChannelError::Kind::Mismatch);
    // The channel stays usable.
    channel.begin_step();
    channel.publish();
    EXPECT_NO_THROW(channel.wait_for_all());
  });
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  EXPECT_THAT(texts[0], HasSubstr("ranks 0, 2: all_gather_into"));
  EXPECT_THAT(texts[0], HasSubstr("rank 1: all_reduce"));
}

} // namespace
} // namespace tessera::comm::shm
