// The store that ranks meet in: ours against itself, and both halves of it
// against c10d's.
#include "comm/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "comm/store/port_handout.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <string>
#include <tuple>

#include "base/unique_fd.h"
#include "comm/store/stores.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StoreTest
    : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  StorePair pair_ = make_pair(std::get<0>(GetParam()), std::get<1>(GetParam()));
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
      return error_of_type<c10::DistNetworkError>(
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
      error_of_type<c10::DistNetworkError>(
          [&] { PortHandout::ask(job + "x", 100ms); }),
      HasSubstr("Did it start?"));
}

} // namespace
} // namespace tessera::comm
