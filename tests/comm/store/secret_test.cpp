#include "comm/store/secret.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/unique_fd.h"
#include "comm/store/processes.h"
#include "comm/store/sockets.h"
#include "comm/store/store.h"
#include "comm/store/wire.h"
#include "support/errors.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string hex_of(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

TEST(SecretTest, DigestsAreThoseOfTheStandards) {
  EXPECT_EQ( // FIPS 180-4
      hex_of(sha256("abc")),
      "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(
      hex_of(sha256("")),
      "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(
      hex_of(
          sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(
      hex_of(sha256(std::string(1'000'000, 'a'))),
      "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ( // RFC 4231, cases 2 and 6
      hex_of(hmac_sha256("Jefe", "what do ya want for nothing?")),
      "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      hex_of(hmac_sha256(
          std::string(131, '\xaa'),
          "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

class SecretStoreTest : public ::testing::Test {
 protected:
  SecretStoreTest() {
    set("a secret of twenty-nine bytes");
    store_ = host_store(endpoint_, 30s);
  }
  ~SecretStoreTest() override {
    unsetenv("TESSERA_STORE_SECRET");
  }

  static void set(const char* secret) {
    setenv("TESSERA_STORE_SECRET", secret, 1);
  }

  StoreEndpoint endpoint_{"127.0.0.1", 0};
  StorePtr store_;
};

TEST_F(SecretStoreTest, ThoseWhoKnowItMeet) {
  const StorePtr client = connect_store(endpoint_, 30s);
  client->set("a", "b");
  EXPECT_EQ(store_->get_to_str("a"), "b");
  EXPECT_EQ(client->clone()->get_to_str("a"), "b");
}

TEST_F(SecretStoreTest, OthersDoNot) {
  set("a secret of another run alike");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(
      error_of([&] { connect_store(endpoint_, 600s); }), // nothing to wait for
      HasSubstr("does not know this process's TESSERA_STORE_SECRET"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 100s);
  unsetenv("TESSERA_STORE_SECRET");
  EXPECT_THAT(
      error_of([&] { connect_store(endpoint_, 1s); }),
      AnyOf(HasSubstr("TESSERA_STORE_SECRET"), HasSubstr(kSlowRefusal)));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint_.port);
  options.timeout = 1s;
  EXPECT_ANY_THROW(
      c10::make_intrusive<c10d::TCPStore>(endpoint_.address, options)
          ->add("n", 1));
  EXPECT_EQ(store_->getNumKeys(), 0);
}

/// Nothing but the proof makes a client, in pieces or at once.
TEST_F(SecretStoreTest, IsNotToBeGuessed) {
  using wire::Message;
  using wire::Query;
  const std::string hello =
      std::string(1, static_cast<char>(wire::kHello)) + std::string(16, 'n');
  const std::string proof =
      std::string(1, static_cast<char>(wire::kProof)) + std::string(32, 'p');
  const std::string set = Message(Query::kSet).key("k").text("v").bytes();
  for (const std::string& words :
       {request(Message(Query::kSet).key("k").text("v")),
        hello + proof + set,
        hello + hello + proof + set,
        proof + set,
        hello + set}) {
    const UniqueFd client = connect_over_ipv4("127.0.0.1", endpoint_.port);
    send(client.get(), words.data(), words.size(), MSG_NOSIGNAL);
    ssize_t count = 0;
    do {
      char bytes[64];
      count = recv(client.get(), bytes, sizeof bytes, 0);
    } while (count > 0);
  }
  EXPECT_EQ(store_->getNumKeys(), 0);
}

/// A client with a secret does not accept a store without one.
TEST_F(SecretStoreTest, IsAskedOfTheStoreToo) {
  unsetenv("TESSERA_STORE_SECRET");
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr open = host_store(endpoint, 30s);
  set("a secret of twenty-nine bytes");
  EXPECT_THAT(
      error_of([&] { connect_store(endpoint, 1s); }),
      AnyOf(HasSubstr("TESSERA_STORE_SECRET"), HasSubstr(kSlowRefusal)));
}

/// Ranks that run as different users.
TEST_F(SecretStoreTest, CountsMoreThanTheUser) {
  SKIP_UNLESS_ROOT();
  Process rank([&] {
    if (setuid(kNeighbour) != 0) {
      return 1;
    }
    connect_store(endpoint_, 30s)->add("n", 5);
    return 0;
  });
  EXPECT_EQ(rank.wait(), 0);
  EXPECT_EQ(store_->add("n", 0), 5);
}

TEST_F(SecretStoreTest, HasToBeLongEnough) {
  set("short");
  EXPECT_THAT(
      error_of([&] { connect_store(endpoint_, 1s); }),
      AllOf(
          HasSubstr("TESSERA_STORE_SECRET has 5 characters"),
          Not(HasSubstr("short"))));
}

} // namespace
} // namespace tessera::comm
