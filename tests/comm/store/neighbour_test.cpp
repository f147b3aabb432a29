// What other users of a host can do to a store, and to its clients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/processes.h"
#include "comm/store/server.h"
#include "comm/store/sockets.h"
#include "comm/store/store.h"
#include "comm/store/wire.h"
#include "support/errors.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using tessera::testing::error_of;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// What a process of another user gets for `words`: 0 if nothing but the end
/// of its connection.
int answer_to_neighbour(
    const std::string& address,
    int port,
    std::string words) {
  return Process([&] {
           if (setuid(kNeighbour) != 0) {
             return 100;
           }
           const UniqueFd client = connect_over_ipv4(address.c_str(), port);
           if (!client) {
             return 101;
           }
           send(client.get(), words.data(), words.size(), MSG_NOSIGNAL);
           pollfd waited{client.get(), POLLIN, 0};
           if (poll(&waited, 1, 30'000) != 1) {
             return 102;
           }
           char byte = 0;
           return recv(client.get(), &byte, 1, 0) <= 0 ? 0 : 1;
         })
      .wait();
}

TEST(NeighbourTest, IsRefusedOnEveryInterface) {
  SKIP_UNLESS_ROOT();
  using wire::Message;
  using wire::Query;
  const std::string words =
      request(Message(Query::kSet).key("verdict").text("forged")) +
      Message(Query::kPing).number<uint32_t>(7).bytes();
  std::vector<std::string> addresses{"127.0.0.1", "127.0.0.7"};
  if (const std::string address = address_of_an_interface(); !address.empty()) {
    addresses.push_back(address);
  }
  for (const std::string host : {"127.0.0.1", "0.0.0.0", "::"}) {
    StoreEndpoint endpoint{host, 0};
    const StorePtr store = host_store(endpoint, 30s);
    for (const std::string& address : addresses) {
      if (host != "127.0.0.1" || address == host) {
        EXPECT_EQ(answer_to_neighbour(address, endpoint.port, words), 0)
            << host << " " << address;
      }
    }
    EXPECT_FALSE(store->check({"verdict"}));
    EXPECT_EQ(store->add("n", 1), 1);
  }
}

/// It is gone before the store looks at it.
TEST(NeighbourTest, IsRefusedThoughItHangsUpAtOnce) {
  SKIP_UNLESS_ROOT();
  UniqueFd listener = listen_everywhere();
  const int port = port_of(listener);
  const std::string words =
      request(wire::Message(wire::Query::kSet).key("verdict").text("forged"));
  for (const bool with_reset : {false, true}) {
    Process neighbour([&] {
      if (setuid(kNeighbour) != 0) {
        return 9;
      }
      const UniqueFd client = connect_over_ipv4("127.0.0.1", port);
      const linger now{.l_onoff = with_reset ? 1 : 0, .l_linger = 0};
      setsockopt(client.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
      send(client.get(), words.data(), words.size(), MSG_NOSIGNAL);
      return 0;
    });
    EXPECT_EQ(neighbour.wait(), 0);
  }
  const StoreServer server(std::move(listener), "");
  const StorePtr store = connect_store({"127.0.0.1", port}, 30s);
  EXPECT_FALSE(store->check({"verdict"}));
}

TEST(NeighbourTest, CannotPlayTheStore) {
  SKIP_UNLESS_ROOT();
  Signpost listens;
  const Process neighbour([&] {
    if (setuid(kNeighbour) != 0) {
      return 9;
    }
    const UniqueFd own = listen_everywhere();
    listens.pass(port_of(own));
    for (;;) {
      const UniqueFd client = accept_from(own);
      char greeting[10]; // Validate and Ping
      recv(client.get(), greeting, sizeof greeting, MSG_WAITALL);
      send(client.get(), greeting + 6, 4, MSG_NOSIGNAL);
      recv(client.get(), greeting, 1, 0);
    }
    return 0;
  });
  const StoreEndpoint endpoint{"127.0.0.1", listens.await()};
  EXPECT_THAT(
      error_of([&] { connect_store(endpoint, 1s); }),
      AnyOf(
          HasSubstr("user 65533 listens there, and this process is of user 0"),
          HasSubstr(kSlowRefusal)));
}

} // namespace
} // namespace tessera::comm
