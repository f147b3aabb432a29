// The store that ranks meet in: ours against itself, and both halves of it
// against c10d's.
#include "comm/store/store.h"

#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "base/unique_fd.h"
#include "comm/host.h"
#include "comm/store/client.h"
#include "comm/store/wire.h"
#include "libtorch/compat.h"

namespace {
std::atomic<int> names_asked_for{0};
/// How often "later.test" is not known before it is.
std::atomic<int> failures_left{0};
} // namespace

/// Replaces the C library's function: a name server with two names, of which
/// "six.test" has only an IPv6 address.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(
    const char* name,
    const char* service,
    const addrinfo* hints,
    addrinfo** result) {
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string_view asked = name == nullptr ? "" : name;
  if (asked == "later.test") {
    if (failures_left.fetch_sub(1) > 0) {
      return EAI_NONAME;
    }
    return real("127.0.0.1", service, hints, result);
  }
  return real(asked == "six.test" ? "::1" : name, service, hints, result);
}

/// Replaces the C library's function, to see who asks name servers.
extern "C" __attribute__((visibility("default"))) int getnameinfo(
    const sockaddr* address,
    socklen_t length,
    char* host,
    socklen_t host_size,
    char* service,
    socklen_t service_size,
    int flags) {
  static const auto real =
      reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  names_asked_for += (flags & NI_NUMERICHOST) == 0 ? 1 : 0;
  return real(
      address,
      length,
      host,
      host_size,
      service,
      service_size,
      flags | NI_NUMERICHOST);
}

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Bytes = std::vector<uint8_t>;

Bytes bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

template <class Error>
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

StorePtr c10d_store(const StoreEndpoint& endpoint, bool is_server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint.port);
  options.isServer = is_server;
  options.waitWorkers = false;
  options.timeout = 30s;
  return c10::make_intrusive<c10d::TCPStore>(endpoint.address, options);
}

/// A store and one client of it.
struct Pair {
  StorePtr server;
  StorePtr client;
};

Pair make_pair(const std::string& server, const std::string& client) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  Pair pair;
  if (server == "ours") {
    pair.server = host_store(endpoint, 30s);
  } else {
    pair.server = c10d_store(endpoint, true);
    endpoint.port = static_cast<const c10d::TCPStore&>(*pair.server).getPort();
  }
  pair.client = client == "ours" ? connect_store(endpoint, 30s)
                                 : c10d_store(endpoint, false);
  return pair;
}

class StoreTest
    : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  Pair pair_ = make_pair(std::get<0>(GetParam()), std::get<1>(GetParam()));
  c10d::Store& store_ = *pair_.client;
  c10d::Store& other_ = *pair_.server;
};

INSTANTIATE_TEST_SUITE_P(
    Halves,
    StoreTest,
    ::testing::Values(
        std::tuple("ours", "ours"),
        std::tuple("ours", "c10d"),
        std::tuple("c10d", "ours")),
    [](const auto& test) {
      return std::get<0>(test.param) + "HostFor" + std::get<1>(test.param);
    });

TEST_P(StoreTest, KeepsValues) {
  store_.set("a", bytes("one"));
  EXPECT_EQ(other_.get("a"), bytes("one"));
  store_.set("a", bytes(""));
  EXPECT_EQ(other_.get("a"), bytes(""));
  const Bytes large(3 << 20, 7);
  store_.set("large", large);
  EXPECT_EQ(other_.get("large"), large);
  EXPECT_EQ(store_.getNumKeys(), other_.getNumKeys());
  EXPECT_TRUE(store_.deleteKey("a"));
  EXPECT_FALSE(store_.deleteKey("a"));
  EXPECT_FALSE(other_.check({"a"}));
}

TEST_P(StoreTest, ComparesAndSets) {
  EXPECT_EQ(store_.compareSet("k", bytes("was"), bytes("new")), bytes("was"));
  EXPECT_FALSE(store_.check({"k"}));
  EXPECT_EQ(store_.compareSet("k", bytes(""), bytes("first")), bytes("first"));
  EXPECT_EQ(store_.compareSet("k", bytes(""), bytes("again")), bytes("first"));
  EXPECT_EQ(store_.compareSet("k", bytes("first"), bytes("2nd")), bytes("2nd"));
  EXPECT_EQ(other_.get("k"), bytes("2nd"));
}

TEST_P(StoreTest, Adds) {
  EXPECT_EQ(store_.add("n", 5), 5);
  EXPECT_EQ(other_.add("n", -7), -2);
  EXPECT_EQ(store_.get("n"), bytes("-2"));
}

TEST_P(StoreTest, ManyAtOnce) {
  store_.multiSet({"x", "y"}, {bytes("1"), bytes("2")});
  store_.append("x", bytes("!"));
  store_.append("z", bytes("3"));
  EXPECT_THAT(
      other_.multiGet({"x", "y", "z"}),
      ElementsAre(bytes("1!"), bytes("2"), bytes("3")));
  EXPECT_TRUE(store_.check({"x", "y"}));
  EXPECT_FALSE(store_.check({"x", "nothing"}));
}

TEST_P(StoreTest, WaitsUntilAllKeysAreThere) {
  store_.set("there", bytes("."));
  auto waited = std::async(std::launch::async, [&] {
    store_.wait({"there", "a", "b", "a"}, 30s);
    return other_.check({"a", "b"});
  });
  EXPECT_EQ(waited.wait_for(50ms), std::future_status::timeout);
  other_.set("a", bytes("."));
  EXPECT_EQ(waited.wait_for(50ms), std::future_status::timeout);
  other_.set("b", bytes("."));
  EXPECT_TRUE(waited.get());
}

TEST_P(StoreTest, IsAsGoodAsBeforeAWaitThatWasTooShort) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(store_.wait({"never"}, 20ms), c10::DistStoreError);
  }
  EXPECT_EQ(store_.add("n", 1), 1);
  other_.set("never", bytes("now"));
  EXPECT_EQ(store_.get("never"), bytes("now"));
}

TEST_P(StoreTest, ClonesSeeTheSame) {
  const StorePtr clone = store_.clone();
  clone->set("a", bytes("b"));
  EXPECT_EQ(store_.get("a"), bytes("b"));
}

TEST_P(StoreTest, ZeroIsNoTimeLimit) {
  if (std::get<1>(GetParam()) != "ours") {
    return; // c10d's gives up at once
  }
  auto waited =
      std::async(std::launch::async, [&] { store_.wait({"a"}, 0ms); });
  EXPECT_EQ(waited.wait_for(50ms), std::future_status::timeout);
  other_.set("a", bytes("."));
  waited.get();
  store_.setTimeout(c10d::Store::kNoTimeout);
  EXPECT_EQ(store_.get("a"), bytes("."));
  EXPECT_EQ(store_.clone()->get("a"), bytes("."));
}

/// What only c10d's client asks for, of our server.
TEST(StoreServerTest, KnowsWhatPythonAsksFor) {
  const Pair pair = make_pair("ours", "c10d");
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
  names_asked_for = 0;
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  client->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  EXPECT_EQ(names_asked_for, 0);
  // c10d's do: this test would see it.
  c10d_store(endpoint, false)->set("a", "c");
  EXPECT_GT(names_asked_for, 0);
}

TEST(StoreServerTest, ListensOnTheLoopbackAddressItIsGiven) {
  StoreEndpoint endpoint{"127.0.0.5", 0};
  const StorePtr server = host_store(endpoint, 30s);
  connect_store(endpoint, 30s)->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  EXPECT_THAT(
      error_of<c10::DistNetworkError>([&] {
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
      error_of<c10::DistNetworkError>([&] {
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

TEST(StoreEndpointTest, ReadsAndWritesIpv6AddressesInBrackets) {
  const auto endpoint = StoreEndpoint::parse("[::1]:29400");
  ASSERT_TRUE(endpoint.has_value());
  EXPECT_EQ(endpoint->address, "::1");
  EXPECT_EQ(endpoint->port, 29400);
  EXPECT_EQ(endpoint->to_string(), "[::1]:29400");
  EXPECT_EQ(StoreEndpoint::parse("node0:1")->to_string(), "node0:1");
  for (const char* text :
       {"",
        "node0",
        "node0:",
        ":1",
        "[]:1",
        "::1:29400",
        "[::1]",
        "node0:0",
        "node0:65536",
        "node0:1x",
        "node0: 1"}) {
    EXPECT_FALSE(StoreEndpoint::parse(text).has_value()) << text;
  }
}

TEST(StoreClientTest, AsksAgainForANameThatIsNotKnownYet) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  failures_left = 2;
  connect_store({"later.test", endpoint.port}, 60s)->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  failures_left = 2;
  EXPECT_EQ(
      address_towards("later.test", 1, std::chrono::steady_clock::now() + 60s),
      "127.0.0.1");
  failures_left = 1'000'000;
  EXPECT_THAT(
      error_of<c10::DistNetworkError>([&] {
        connect_store({"later.test", endpoint.port}, 700ms);
      }),
      HasSubstr("cannot resolve the host \"later.test\""));
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

TEST(StoreClientTest, SaysThatTheStoreIsGone) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  server.reset();
  for (int i = 0; i < 2; ++i) { // it stays gone
    EXPECT_THAT(
        error_of<c10::DistNetworkError>([&] { client->add("n", 1); }),
        HasSubstr("the store on 127.0.0.1:"));
  }
}

/// A rank 0 that is suspended holds its name and takes connections, and says
/// nothing; with its queue full it does not even take them.
TEST(PortHandoutTest, AskingASilentRankZeroEndsInTime) {
  const std::string job = "silent." + std::to_string(getpid());
  const std::string name =
      std::string(1, '\0') + fmt::format("tessera/{}/{}", geteuid(), job);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), raw, length), 0);
  ASSERT_EQ(listen(listener.get(), 0), 0);
  for (int i = 0; i < 2; ++i) { // the second finds the queue full
    auto asked = std::async(std::launch::async, [&] {
      return error_of<c10::DistNetworkError>(
          [&] { PortHandout::ask(job, 300ms); });
    });
    if (asked.wait_for(30s) != std::future_status::ready) {
      shutdown(listener.get(), SHUT_RDWR); // lets the thread end
      FAIL() << "it waits for ever";
    }
    EXPECT_THAT(
        asked.get(),
        AllOf(
            HasSubstr("did not offer its port within 0.3 s"),
            HasSubstr("is it suspended?")));
  }
}

TEST(PortHandoutTest, AnswersTheRanksOfItsJob) {
  const std::string job = "answers." + std::to_string(getpid());
  const PortHandout handout(job, 4711);
  EXPECT_EQ(PortHandout::ask(job, 30s), 4711);
  EXPECT_THAT(
      error_of<c10::DistNetworkError>(
          [&] { PortHandout::ask(job + "x", 100ms); }),
      HasSubstr("Did it start?"));
}

TEST(StoreClientTest, AnExchangeSaysWhoseStoreIsGone) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  server.reset();
  EXPECT_THAT(
      error_of<PeerLostError>([&] {
        exchange(*client, "key", 1, {4, 7}, "value", 30s, "split");
      }),
      AllOf(HasSubstr("[split] rank 7"), HasSubstr("the store on 127.0.0.1:")));
}

/// A process may be rank 0 again after an attempt that failed.
TEST(StoreClientTest, ACloneOutlivesTheConnectionItCameFrom) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr hosted = host_store(endpoint, 30s);
  hosted->set("text", "no number");
  EXPECT_THROW(hosted->add("text", 1), c10::DistNetworkError); // cut off
  EXPECT_THROW(hosted->getNumKeys(), c10::DistNetworkError);
  EXPECT_EQ(hosted->clone()->get_to_str("text"), "no number");
}

/// Accepts connections, lets `answer` have each, and keeps them open.
class Listener {
 public:
  explicit Listener(std::function<void(int)> answer = [](int) {})
      : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_.get(), generic, length), 0);
    EXPECT_EQ(listen(socket_.get(), 8), 0);
    EXPECT_EQ(getsockname(socket_.get(), generic, &length), 0);
    endpoint_.port = ntohs(address.sin_port);
    thread_ = std::thread([this, answer = std::move(answer)] {
      for (;;) {
        UniqueFd client(accept(socket_.get(), nullptr, nullptr));
        if (!client) {
          return;
        }
        answer(client.get());
        clients_.push_back(std::move(client));
      }
    });
  }
  ~Listener() {
    shutdown(socket_.get(), SHUT_RDWR);
    thread_.join();
  }
  const StoreEndpoint& endpoint() const {
    return endpoint_;
  }

 private:
  UniqueFd socket_;
  StoreEndpoint endpoint_{"127.0.0.1", 0};
  std::vector<UniqueFd> clients_;
  std::thread thread_;
};

std::string error_of_connecting(const StoreEndpoint& endpoint) {
  return error_of<c10::DistNetworkError>(
      [&] { connect_store(endpoint, 300ms); });
}

TEST(StoreClientTest, ToldApartFromWhatIsNoStore) {
  const Listener silent;
  EXPECT_THAT(
      error_of_connecting(silent.endpoint()),
      HasSubstr("it does not answer as a store"));
  const Listener other([](int fd) {
    const std::string_view text = "HTTP/1.1 400 Bad Request\r\n\r\n";
    send(fd, text.data(), text.size(), MSG_NOSIGNAL);
  });
  EXPECT_THAT(
      error_of_connecting(other.endpoint()),
      HasSubstr("it does not answer as a store"));
  const Listener closing([](int fd) { shutdown(fd, SHUT_RDWR); });
  EXPECT_THAT(
      error_of_connecting(closing.endpoint()),
      AnyOf(
          HasSubstr("it closed the connection"),
          HasSubstr("Connection reset by peer"),
          HasSubstr("Broken pipe")));
}

/// A store that was there, greets, and then is suspended.
TEST(StoreClientTest, GivesUpOnAStoreThatNoLongerAnswers) {
  const Listener suspended([](int fd) {
    char greeting[10]; // Validate and Ping
    EXPECT_EQ(recv(fd, greeting, sizeof greeting, MSG_WAITALL), 10);
    send(fd, greeting + 6, 4, MSG_NOSIGNAL);
  });
  const StorePtr store = connect_store(suspended.endpoint(), 300ms);
  store->set("a", "b"); // has no answer
  EXPECT_THAT(
      error_of<c10::DistNetworkError>([&] { store->add("n", 1); }),
      HasSubstr("it does not answer"));
  EXPECT_THAT(
      error_of<c10::DistNetworkError>([&] { store->add("n", 1); }),
      HasSubstr("failed before"));
}

TEST(StoreClientTest, RefusesWhatIsTooLarge) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr store = host_store(endpoint, 30s);
  EXPECT_THAT(
      error_of<c10::DistStoreError>(
          [&] { store->add(std::string(wire::kMaxKeyBytes, 'k'), 1); }),
      HasSubstr("a key or a value is too long"));
  EXPECT_THAT(
      error_of<c10::DistStoreError>([&] {
        store->multiSet(
            std::vector<std::string>(9, "k"),
            std::vector<Bytes>(9, Bytes(wire::kMaxValueBytes)));
      }),
      HasSubstr("the request is too long"));
  EXPECT_THAT(
      error_of<c10::DistStoreError>(
          [&] { store->set("k", Bytes(wire::kMaxValueBytes + 1)); }),
      HasSubstr("send data with a collective"));
  store->set("k", Bytes(wire::kMaxValueBytes));
  EXPECT_EQ(store->get("k").size(), wire::kMaxValueBytes);
}

TEST(StoreWireTest, IsWhatC10dSpeaks) {
  using c10d::detail::QueryType;
  const auto same = [](wire::Query ours, QueryType theirs) {
    return static_cast<uint8_t>(ours) == static_cast<uint8_t>(theirs);
  };
  EXPECT_EQ(wire::kMagic, c10d::detail::validationMagicNumber);
  EXPECT_TRUE(same(wire::Query::kValidate, QueryType::VALIDATE));
  EXPECT_TRUE(same(wire::Query::kSet, QueryType::SET));
  EXPECT_TRUE(same(wire::Query::kCompareSet, QueryType::COMPARE_SET));
  EXPECT_TRUE(same(wire::Query::kGet, QueryType::GET));
  EXPECT_TRUE(same(wire::Query::kAdd, QueryType::ADD));
  EXPECT_TRUE(same(wire::Query::kCheck, QueryType::CHECK));
  EXPECT_TRUE(same(wire::Query::kWait, QueryType::WAIT));
  EXPECT_TRUE(same(wire::Query::kCount, QueryType::GETNUMKEYS));
  EXPECT_TRUE(same(wire::Query::kDelete, QueryType::DELETE_KEY));
  EXPECT_TRUE(same(wire::Query::kAppend, QueryType::APPEND));
  EXPECT_TRUE(same(wire::Query::kMultiGet, QueryType::MULTI_GET));
  EXPECT_TRUE(same(wire::Query::kMultiSet, QueryType::MULTI_SET));
  EXPECT_TRUE(same(wire::Query::kCancelWait, QueryType::CANCEL_WAIT));
  EXPECT_TRUE(same(wire::Query::kPing, QueryType::PING));
  EXPECT_TRUE(same(wire::Query::kQueuePush, QueryType::QUEUE_PUSH));
  EXPECT_TRUE(same(wire::Query::kQueuePop, QueryType::QUEUE_POP));
  EXPECT_TRUE(same(wire::Query::kQueueLength, QueryType::QUEUE_LEN));
  EXPECT_TRUE(same(wire::Query::kListKeys, QueryType::LIST_KEYS));
#if TESSERA_TORCH_AT_LEAST(2, 13)
  EXPECT_TRUE(same(wire::Query::kBarrier, QueryType::BARRIER));
#endif
}

TEST(StoreWireTest, ARequestIsTakenOnceAllOfItIsThere) {
  using wire::Message;
  using wire::Query;
  const Message messages[] = {
      Message(Query::kPing).number<uint32_t>(7),
      Message(Query::kCompareSet).key("k").text("was").text("is"),
      Message(Query::kAdd).key("n").number<int64_t>(-3),
      Message(Query::kMultiSet)
          .number<uint64_t>(2)
          .key("a")
          .text("1")
          .key("b")
          .text(""),
      Message(Query::kCount)};
  for (const Message& message : messages) {
    const std::string text = message.bytes() + "rest";
    for (size_t size = 0; size < message.bytes().size(); ++size) {
      std::string_view part = std::string_view(text).substr(0, size);
      size_t needed = 0;
      EXPECT_FALSE(wire::take_request(part, needed).has_value());
      EXPECT_EQ(part.size(), size); // nothing was taken
      EXPECT_GT(needed, size);
      EXPECT_LE(needed, message.bytes().size());
    }
    std::string_view rest = text;
    size_t needed = 0;
    EXPECT_TRUE(wire::take_request(rest, needed).has_value());
    EXPECT_EQ(rest, "rest");
    EXPECT_EQ(needed, message.bytes().size());
  }
  std::string_view text = messages[3].bytes();
  size_t needed = 0;
  const auto request = wire::take_request(text, needed);
  EXPECT_THAT(request->keys, ElementsAre("/a", "/b"));
  EXPECT_THAT(request->values, ElementsAre("1", ""));
}

/// Requests with some bytes changed: each is taken, refused or found short.
TEST(StoreWireTest, TakesNothingThatIsNotThere) {
  using wire::Message;
  using wire::Query;
  const Message messages[] = {
      Message(Query::kSet).key("key").text("value"),
      Message(Query::kWait).number<uint64_t>(3).key("a").key("b").key("c"),
      Message(Query::kMultiSet).number<uint64_t>(1).key("a").text("1"),
      Message(Query::kBarrier).key("b").number<int64_t>(2)};
  std::mt19937 random(7);
  const auto below = [&](size_t limit) { return random() % limit; };
  int num_taken = 0;
  int num_refused = 0;
  int num_short = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::string& message = messages[below(std::size(messages))].bytes();
    // Exactly as large as it is, so that a sanitizer sees a step beyond it.
    std::vector<char> bytes(message.begin(), message.end());
    for (size_t left = 1 + below(3); left > 0; --left) {
      bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    std::string_view rest(bytes.data(), bytes.size());
    size_t needed = 0;
    try {
      const auto request = wire::take_request(rest, needed);
      if (!request) {
        ++num_short;
        ASSERT_GT(needed, bytes.size());
        continue;
      }
      ++num_taken;
      ASSERT_EQ(needed + rest.size(), bytes.size());
      for (const auto& texts : {request->keys, request->values}) {
        for (const std::string_view text : texts) {
          ASSERT_TRUE(
              text.empty() ||
              (text.data() > bytes.data() && text.end() <= rest.begin()));
        }
      }
    } catch (const wire::BadRequest&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_taken, 1000);
  EXPECT_GT(num_refused, 1000);
  EXPECT_GT(num_short, 1000);
}

} // namespace
} // namespace tessera::comm
