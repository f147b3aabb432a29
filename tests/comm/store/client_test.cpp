// What a client of a store says when something is wrong.
#include "comm/store/client.h"

#include <tessera/error.h>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/host.h"
#include "comm/store/name_server.h"
#include "comm/store/store.h"
#include "comm/store/stores.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(StoreClientTest, AsksAgainForANameThatIsNotKnownYet) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr server = host_store(endpoint, 30s);
  testing::failures_left = 2;
  connect_store({"later.test", endpoint.port}, 60s)->set("a", "b");
  EXPECT_EQ(server->get_to_str("a"), "b");
  testing::failures_left = 2;
  EXPECT_EQ(
      address_towards("later.test", 1, std::chrono::steady_clock::now() + 60s),
      "127.0.0.1");
  testing::failures_left = 1'000'000;
  EXPECT_THAT(
      error_of_type<c10::DistNetworkError>([&] {
        connect_store({"later.test", endpoint.port}, 700ms);
      }),
      HasSubstr("cannot resolve the host \"later.test\""));
}

TEST(StoreClientTest, SaysThatTheStoreIsGone) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  server.reset();
  for (int i = 0; i < 2; ++i) { // it stays gone
    EXPECT_THAT(
        error_of_type<c10::DistNetworkError>([&] { client->add("n", 1); }),
        HasSubstr("the store on 127.0.0.1:"));
  }
}

TEST(StoreClientTest, AnExchangeSaysWhoseStoreIsGone) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePtr server = host_store(endpoint, 30s);
  const StorePtr client = connect_store(endpoint, 30s);
  server.reset();
  EXPECT_THAT(
      error_of_type<PeerLostError>([&] {
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
  return error_of_type<c10::DistNetworkError>(
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
      error_of_type<c10::DistNetworkError>([&] { store->add("n", 1); }),
      HasSubstr("it does not answer"));
  EXPECT_THAT(
      error_of_type<c10::DistNetworkError>([&] { store->add("n", 1); }),
      HasSubstr("failed before"));
}

TEST(StoreClientTest, RefusesWhatIsTooLarge) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  const StorePtr store = host_store(endpoint, 30s);
  EXPECT_THAT(
      error_of_type<c10::DistStoreError>(
          [&] { store->add(std::string(wire::kMaxKeyBytes, 'k'), 1); }),
      HasSubstr("a key or a value is too long"));
  EXPECT_THAT(
      error_of_type<c10::DistStoreError>([&] {
        store->multiSet(
            std::vector<std::string>(9, "k"),
            std::vector<Bytes>(9, Bytes(wire::kMaxValueBytes)));
      }),
      HasSubstr("the request is too long"));
  EXPECT_THAT(
      error_of_type<c10::DistStoreError>(
          [&] { store->set("k", Bytes(wire::kMaxValueBytes + 1)); }),
      HasSubstr("send data with a collective"));
  store->set("k", Bytes(wire::kMaxValueBytes));
  EXPECT_EQ(store->get("k").size(), wire::kMaxValueBytes);
}

} // namespace
} // namespace tessera::comm
