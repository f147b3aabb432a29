// What clients can make a store hold.
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/processes.h"
#include "comm/store/server.h"
#include "comm/store/sockets.h"
#include "comm/store/store.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

/// Fewer descriptors than a test has, for as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t count) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = count;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FewDescriptors() {
    setrlimit(RLIMIT_NOFILE, &before_);
  }

 private:
  rlimit before_;
};

/// Holds connections that say nothing until it is gone.
class Crowd {
 public:
  Crowd(uid_t user, int port, int size)
      : process_([=, this] {
          rlimit many{4096, 4096};
          setrlimit(RLIMIT_NOFILE, &many);
          if (setuid(user) != 0) {
            return 1;
          }
          std::vector<UniqueFd> held;
          for (int i = 0; i < size; ++i) {
            held.push_back(connect_over_ipv4("127.0.0.1", port));
          }
          is_there_.pass();
          pause();
          return 0;
        }) {
    is_there_.await();
  }

 private:
  Signpost is_there_; // before the process that uses it
  Process process_;
};

TEST(NeighbourTest, CannotTakeAllDescriptors) {
  SKIP_UNLESS_ROOT();
  const FewDescriptors few(256);
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr store = host_store(endpoint, 30s);
  const Crowd crowd(kNeighbour, endpoint.port, 1019);
  EXPECT_EQ(connect_store(endpoint, 30s)->add("n", 1), 1);
}

TEST(StoreServerTest, ACrowdThatNeverGreetsHasToGo) {
  const FewDescriptors few(256);
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr store = host_store(endpoint, 30s);
  const Crowd crowd(geteuid(), endpoint.port, 1019);
  EXPECT_EQ(connect_store(endpoint, 30s)->add("n", 1), 1);
}

TEST(StoreServerTest, HoldsSoMuchAndNoMore) {
  UniqueFd listener = listen_everywhere();
  const StoreEndpoint endpoint{"127.0.0.1", port_of(listener)};
  const StoreServer server(
      std::move(listener), "", StoreLimits{.stored_bytes = 1 << 20});
  const std::string large(100'000, 'x');
  const auto fill = [&](const std::function<void(c10d::Store&, int)>& add) {
    const StorePtr store = connect_store(endpoint, 30s);
    for (int i = 0; i < 20; ++i) {
      add(*store, i);
    }
    store->add("n", 1);
  };
  const auto clear = [&] {
    const StorePtr store = connect_store(endpoint, 30s);
    for (int i = 0; i < 20; ++i) {
      store->deleteKey("large" + std::to_string(i));
      store->deleteKey("x");
    }
    store->deleteKey("n");
    EXPECT_EQ(store->getNumKeys(), 0);
  };
  const auto name = [](int i) { return "large" + std::to_string(i); };
  for (int round = 0; round < 3; ++round) { // deleted values no longer count
    EXPECT_THROW(
        fill([&](auto& store, int i) { store.set(name(i), large); }),
        c10::DistNetworkError);
    clear();
    EXPECT_THROW(
        fill([&](auto& store, int) {
          store.append("x", {large.begin(), large.end()});
        }),
        c10::DistNetworkError);
    clear();
    EXPECT_THROW(
        fill([&](auto& store, int) {
          const std::vector<uint8_t> bytes(large.begin(), large.end());
          store.multiSet(
              std::vector<std::string>(11, "m"),
              std::vector<std::vector<uint8_t>>(11, bytes));
        }),
        c10::DistNetworkError);
    // Replacing is not adding.
    fill([&](auto& store, int) { store.set("x", large); });
    fill([&](auto& store, int) { store.compareSet("x", large, large); });
    clear();
  }
  // The number of waiting clients is limited, too.
  const StorePtr waiting = connect_store(endpoint, 30s);
  const std::vector<std::string> keys(2000, std::string(1000, 'k'));
  EXPECT_THROW(waiting->wait(keys, 30s), c10::DistNetworkError);
  fill([&](auto& store, int) { store.set("x", large); });
}

/// Requests that are never finished.
TEST(StoreServerTest, CutsOffWhoHoldsTheMost) {
  UniqueFd listener = listen_everywhere();
  const int port = port_of(listener);
  const StoreServer server(
      std::move(listener), "", StoreLimits{.buffered_bytes = 1 << 20});
  const std::string half = request(
      wire::Message(wire::Query::kSet).key("k").number<uint64_t>(1 << 20));
  std::vector<UniqueFd> holders;
  for (const size_t size : {100'000, 700'000, 200'000, 300'000}) {
    holders.push_back(connect_over_ipv4("127.0.0.1", port));
    const std::string words = half + std::string(size, 'x');
    for (size_t sent = 0; sent < words.size();) {
      const ssize_t count = send(
          holders.back().get(),
          words.data() + sent,
          words.size() - sent,
          MSG_NOSIGNAL);
      ASSERT_GT(count, 0);
      sent += static_cast<size_t>(count);
    }
  }
  pollfd largest{holders[1].get(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&largest, 1, 30'000), 1);
  connect_store({"127.0.0.1", port}, 30s)->add("n", 1);
  for (const size_t other : {0, 2, 3}) {
    pollfd kept{holders[other].get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&kept, 1, 0), 0) << other;
  }
}

} // namespace
} // namespace tessera::comm
