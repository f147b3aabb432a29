// What the server of a store does for its clients, and against some.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <limits>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/name_server.h"
#include "comm/store/store.h"
#include "comm/store/stores.h"
#include "comm/store/wire.h"
#include "libtorch/compat.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

/// What only c10d's client asks for, of our server.
TEST(StoreServerTest, KnowsWhatPythonAsksFor) {
  const StorePair pair = make_pair("ours", "c10d");
  c10d::Store& store = *pair.client;
  store.set("a", bytes("1"));
  store.set("b", bytes("1"));
  EXPECT_THAT(store.listKeys(), UnorderedElementsAre("a", "b"));

  EXPECT_EQ(store.queueLen("q"), 0);
  store.queuePush("q", bytes("one"));
  store.queuePush("q", bytes("two"));
  EXPECT_EQ(store.queueLen("q"), 2);
  EXPECT_EQ(store.queuePop("q", true), bytes("one"));
  EXPECT_EQ(store.queuePop("q", false), bytes("two"));
  EXPECT_ANY_THROW(store.queuePop("q", false));
  const StorePtr second = store.clone();
  auto popped = std::async(
      std::launch::async, [&] { return second->queuePop("q", true); });
  EXPECT_EQ(popped.wait_for(50ms), std::future_status::timeout);
  store.queuePush("q", bytes("three"));
  EXPECT_EQ(popped.get(), bytes("three"));

  // One waits for something else besides: the push is for the other.
  auto for_both = std::async(std::launch::async, [&] {
    second->wait({"q", "c"}, 30s);
  });
  EXPECT_EQ(for_both.wait_for(50ms), std::future_status::timeout);
  const StorePtr third = store.clone();
  popped = std::async(
      std::launch::async, [&] { return third->queuePop("q", true); });
  EXPECT_EQ(popped.wait_for(50ms), std::future_status::timeout);
  store.queuePush("q", bytes("four"));
  EXPECT_EQ(popped.get(), bytes("four"));
  store.set("c", bytes("1"));
  for_both.get();

#if TESSERA_TORCH_AT_LEAST(2, 13)
  auto passed = std::async(
      std::launch::async, [&] { second->barrier("barrier", 2, 30s); });
  EXPECT_EQ(passed.wait_for(50ms), std::future_status::timeout);
  store.barrier("barrier", 2, 30s);
  passed.get();
#endif
}

TEST(StoreServerTest, ServesManyClientsAtOnce) {
  constexpr int kClients = 64;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  std::vector<std::future<void>> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(std::async(std::launch::async, [&] {
      const StorePtr store = connect_store(endpoint, 30s);
      if (store->add("came", 1) == kClients) {
        store->set("all", "came");
      }
      store->wait({"all"}, 30s);
      for (int round = 0; round < 100; ++round) {
        store->add("rounds", 1);
      }
    }));
  }
  for (auto& client : clients) {
    client.get();
  }
  EXPECT_EQ(server->add("rounds", 0), kClients * 100);
}

TEST(StoreServerTest, AsksForNoNames) {
  testing::names_asked_for = 0;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  client->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  EXPECT_EQ(testing::names_asked_for, 0);
  // c10d's do: this test would see it.
  c10d_store(endpoint, false)->set("a", "c");
  EXPECT_GT(testing::names_asked_for, 0);
}

TEST(StoreServerTest, ListensOnTheLoopbackAddressItIsGiven) {
  StoreEndpoint endpoint{"127.0.0.5", 0};
  const StorePtr server = host_store(endpoint, 30s);
  connect_store(endpoint, 30s)->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  EXPECT_THAT(
      error_of_type<c10::DistNetworkError>([&] {
        connect_store({"127.0.0.1", endpoint.port}, 50ms);
      }),
      HasSubstr("Connection refused"));
}

/// Whether a client reaches a store that listens on `host` by each name.
void expect_to_meet(
    const std::string& host,
    const std::vector<std::string>& names) {
  StoreEndpoint endpoint{host, 0};
  const StorePtr server = host_store(endpoint, 30s);
  for (const std::string& name : names) {
    connect_store({name, endpoint.port}, 30s)->set(name, "here");
    EXPECT_EQ(server->get_to_str(name), "here") << host << " " << name;
  }
  EXPECT_EQ(server->clone()->getNumKeys(), static_cast<int64_t>(names.size()));
}

TEST(StoreServerTest, ListensOnIpv6) {
  expect_to_meet("::1", {"::1", "[::1]", "six.test"});
  expect_to_meet("[::1]", {"::1"});
  StoreEndpoint endpoint{"::1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  EXPECT_THAT(
      error_of_type<c10::DistNetworkError>([&] {
        connect_store({"127.0.0.1", endpoint.port}, 50ms);
      }),
      HasSubstr("Connection refused"));
}

/// Whatever addresses its name has on other hosts.
TEST(StoreServerTest, ListensOnIpv6AndIpv4UnlessOnLoopback) {
  expect_to_meet("six.test", {"six.test", "::1", "127.0.0.1"});
  expect_to_meet("0.0.0.0", {"127.0.0.1", "127.0.0.5", "::1"});
  expect_to_meet("localhost", {"localhost"});
}

/// A connection that sends arbitrary bytes.
class Intruder {
 public:
  explicit Intruder(int port) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(
        connect(
            socket_.get(),
            reinterpret_cast<sockaddr*>(&address),
            sizeof address),
        0);
  }

  Intruder& say(const wire::Message& message) {
    const std::string& text = message.bytes();
    size_t sent = 0;
    while (sent < text.size()) {
      const ssize_t count = send(
          socket_.get(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) {
        break;
      }
      sent += static_cast<size_t>(count);
    }
    return *this;
  }
  Intruder& validate() {
    return say(wire::Message(wire::Query::kValidate).number(wire::kMagic));
  }

  /// Whether the other side closes within a while. Reads nothing before.
  bool is_cut_off() {
    pollfd waited{socket_.get(), POLLIN, 0};
    char byte = 0;
    return poll(&waited, 1, 10'000) == 1 &&
        recv(socket_.get(), &byte, 1, 0) <= 0;
  }
  bool is_hung_up() {
    pollfd waited{socket_.get(), POLLRDHUP, 0};
    return poll(&waited, 1, 10'000) == 1;
  }

 private:
  UniqueFd socket_;
};

wire::Message ask_for(uint64_t times, const std::string& key) {
  wire::Message message(wire::Query::kMultiGet);
  message.number(times);
  for (uint64_t i = 0; i < times; ++i) {
    message.key(key);
  }
  return message;
}

TEST(StoreServerTest, CutsOffWhoSpeaksNonsense) {
  using wire::Message;
  using wire::Query;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  server->set("text", "no number");
  server->set("large", Bytes(8 << 20, 1));
  server->set("most", std::to_string(std::numeric_limits<int64_t>::max()));
  EXPECT_EQ(server->getNumKeys(), 3); // they have arrived
  const auto speaks = [&](const Message& message) {
    Intruder intruder(endpoint.port);
    return intruder.validate().say(message).is_cut_off();
  };
  EXPECT_TRUE(Intruder(endpoint.port)
                  .say(Message(Query::kPing).number<uint32_t>(1))
                  .is_cut_off());
  EXPECT_TRUE(Intruder(endpoint.port)
                  .say(Message(Query::kValidate).number<uint32_t>(1))
                  .is_cut_off());
  // Not after what it announces has come.
  EXPECT_TRUE(Intruder(endpoint.port)
                  .say(Message(Query::kSet).number<uint64_t>(1))
                  .is_cut_off());
  EXPECT_TRUE(speaks(Message().number<uint8_t>(200)));
  EXPECT_TRUE(speaks(Message(Query::kGet).number<uint64_t>(~0ull)));
  EXPECT_TRUE(speaks(Message(Query::kSet).key("k").number<uint64_t>(1 << 30)));
  EXPECT_TRUE(speaks(Message(Query::kWait).number<uint64_t>(1 << 20)));
  EXPECT_TRUE(speaks(ask_for(20, "large")));
  EXPECT_TRUE(speaks(Message(Query::kAdd).key("text").number<int64_t>(1)));
  EXPECT_TRUE(speaks(Message(Query::kAdd).key("most").number<int64_t>(1)));
  EXPECT_TRUE(speaks(Message(Query::kBarrier).key("most").number<int64_t>(2)));
  EXPECT_TRUE(speaks(Message(Query::kAppend).key("large").text("more")));
  EXPECT_EQ(server->get_to_str("text"), "no number");
}

TEST(StoreServerTest, OutlivesClientsThatLeaveInTheMiddle) {
  using wire::Message;
  using wire::Query;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  for (int i = 0; i < 20; ++i) {
    Intruder(endpoint.port); // says nothing
    Intruder(endpoint.port)
        .validate()
        .say(Message(Query::kWait).number<uint64_t>(1).key("later"));
    Intruder(endpoint.port)
        .validate()
        .say(Message(Query::kSet).number<uint64_t>(100));
  }
  server->set("later", "now"); // those who waited for it are gone
  EXPECT_EQ(server->get_to_str("later"), "now");
}

TEST(StoreServerTest, CutsOffWhoNeverReads) {
  using wire::Message;
  using wire::Query;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  server->set("large", Bytes(8 << 20, 1));
  EXPECT_EQ(server->getNumKeys(), 1); // it has arrived
  Intruder intruder(endpoint.port);
  intruder.validate();
  for (int i = 0; i < 16; ++i) {
    intruder.say(Message(Query::kGet).key("large"));
  }
  EXPECT_TRUE(intruder.is_hung_up());
  EXPECT_EQ(server->add("n", 1), 1);
}

} // namespace
} // namespace tessera::comm
