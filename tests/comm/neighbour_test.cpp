// What other users of a host, and strangers on the network, can do to a store.
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/host.h"
#include "comm/store/peer_owner.h"
#include "comm/store/secret.h"
#include "comm/store/server.h"
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
using Kind = PeerOwner::Kind;

constexpr uid_t kNeighbour = 65533;
/// How a refusal looks on a machine that is too busy to report it in time.
constexpr const char* kSlow = "it does not answer as a store";

#define SKIP_UNLESS_ROOT()                                             \
  if (geteuid() != 0) {                                                \
    GTEST_SKIP() << "another user cannot be played here (needs root)"; \
  }

/// A process with a task; its result is what `task` returns, 0 to 255.
class Process {
 public:
  explicit Process(const std::function<int()>& task) : pid_(fork()) {
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(task());
    }
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

/// Tells another process that something has happened.
class Signpost {
 public:
  Signpost() {
    EXPECT_EQ(pipe(ends_), 0);
  }
  ~Signpost() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void pass(int number = 0) {
    EXPECT_EQ(write(ends_[1], &number, sizeof number), sizeof number);
  }
  /// The number that was passed on.
  int await() {
    int number = -1;
    EXPECT_EQ(read(ends_[0], &number, sizeof number), sizeof number);
    return number;
  }

 private:
  int ends_[2];
};

UniqueFd listen_everywhere() {
  UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int off = 0;
  setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  EXPECT_EQ(
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any), 0);
  EXPECT_EQ(listen(fd.get(), 1024), 0);
  return fd;
}

int port_of(const UniqueFd& listener) {
  sockaddr_in6 bound{};
  socklen_t length = sizeof bound;
  EXPECT_EQ(
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length),
      0);
  return ntohs(bound.sin6_port);
}

UniqueFd connect_over_ipv4(const char* address, int port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address, &to.sin_addr);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
    fd.reset();
  }
  return fd;
}

UniqueFd connect_over_ipv6(const char* address, int port) {
  UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 to{};
  to.sin6_family = AF_INET6;
  to.sin6_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET6, address, &to.sin6_addr);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
    fd.reset();
  }
  return fd;
}

UniqueFd accept_from(const UniqueFd& listener) {
  return UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

/// An address of this host that is not loopback; empty if there is none.
std::string address_of_an_interface() {
  ifaddrs* all = nullptr;
  getifaddrs(&all);
  std::string result;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr != nullptr && at->ifa_addr->sa_family == AF_INET) {
      char text[INET_ADDRSTRLEN];
      inet_ntop(
          AF_INET,
          &reinterpret_cast<sockaddr_in*>(at->ifa_addr)->sin_addr,
          text,
          sizeof text);
      result = is_loopback(text) ? result : text;
    }
  }
  freeifaddrs(all);
  return result;
}

/// The kernel refuses sockets of netlink, as in some containers.
bool refuse_netlink() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool hide_proc() {
  return unshare(CLONE_NEWNS) == 0 &&
      mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      mount("none", "/proc", "tmpfs", 0, nullptr) == 0;
}

/// The kind of owner that a process sees of its own connection, and whether it
/// is its own user's, after it did something to itself.
int kind_seen_after(const std::function<bool()>& doing) {
  return Process([&] {
           if (!doing()) {
             return 200;
           }
           const UniqueFd listener = listen_everywhere();
           const UniqueFd client =
               connect_over_ipv4("127.0.0.1", port_of(listener));
           const UniqueFd server = accept_from(listener);
           const PeerOwner owner = owner_of_peer(server.get());
           return static_cast<int>(owner.kind) +
               (owner.kind == Kind::kUser && !owner.is_ours() ? 100 : 0);
         })
      .wait();
}

TEST(PeerOwnerTest, IsThisUserAtBothEndsOverEveryAddress) {
  const UniqueFd listener = listen_everywhere();
  const int port = port_of(listener);
  std::vector<UniqueFd> clients;
  clients.push_back(connect_over_ipv4("127.0.0.1", port));
  clients.push_back(connect_over_ipv4("127.0.0.9", port));
  clients.push_back(connect_over_ipv6("::ffff:127.0.0.1", port));
  clients.push_back(connect_over_ipv6("::1", port));
  if (const std::string address = address_of_an_interface(); !address.empty()) {
    clients.push_back(connect_over_ipv4(address.c_str(), port));
  }
  for (const UniqueFd& client : clients) {
    ASSERT_TRUE(client);
    const UniqueFd server = accept_from(listener);
    for (const UniqueFd* end : {&client, &server}) {
      const PeerOwner owner = owner_of_peer(end->get());
      EXPECT_EQ(owner.kind, Kind::kUser);
      EXPECT_EQ(owner.uid, geteuid());
      EXPECT_TRUE(owner.is_ours());
    }
  }
}

TEST(PeerOwnerTest, IsAnotherUser) {
  SKIP_UNLESS_ROOT();
  const UniqueFd listener = listen_everywhere();
  const Process neighbour([&] {
    if (setuid(kNeighbour) != 0) {
      return 9;
    }
    const UniqueFd client = connect_over_ipv4("127.0.0.1", port_of(listener));
    pause();
    return 0;
  });
  const UniqueFd server = accept_from(listener);
  const PeerOwner owner = owner_of_peer(server.get());
  EXPECT_EQ(owner.kind, Kind::kUser);
  EXPECT_EQ(owner.uid, kNeighbour);
  EXPECT_FALSE(owner.is_ours());
}

/// Some kernels call the user of a closed socket 0, which is root.
TEST(PeerOwnerTest, IsGoneOnceItIsClosed) {
  SKIP_UNLESS_ROOT();
  for (const bool with_reset : {false, true}) {
    const UniqueFd listener = listen_everywhere();
    Process neighbour([&] {
      if (setuid(kNeighbour) != 0) {
        return 9;
      }
      const UniqueFd client = connect_over_ipv4("127.0.0.1", port_of(listener));
      const linger now{.l_onoff = with_reset ? 1 : 0, .l_linger = 0};
      setsockopt(client.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
      return send(client.get(), "x", 1, 0) == 1 ? 0 : 1;
    });
    EXPECT_EQ(neighbour.wait(), 0);
    const UniqueFd server = accept_from(listener);
    EXPECT_EQ(owner_of_peer(server.get()).kind, Kind::kGone);
  }
}

TEST(PeerOwnerTest, IsFoundInProcWhereNetlinkIsRefused) {
  EXPECT_EQ(kind_seen_after(refuse_netlink), static_cast<int>(Kind::kUser));
}

TEST(PeerOwnerTest, IsUntoldWhereNothingTells) {
  SKIP_UNLESS_ROOT();
  EXPECT_EQ(
      kind_seen_after([] { return refuse_netlink() && hide_proc(); }),
      static_cast<int>(Kind::kUntold));
  EXPECT_EQ(kind_seen_after(hide_proc), static_cast<int>(Kind::kUser));
}

TEST(PeerOwnerTest, IsUnmappedInAUserNamespaceWithoutThatUser) {
  if (Process([] { return unshare(CLONE_NEWUSER) == 0 ? 0 : 1; }).wait() != 0) {
    GTEST_SKIP() << "user namespaces cannot be made here";
  }
  EXPECT_EQ(
      kind_seen_after([] { return unshare(CLONE_NEWUSER) == 0; }),
      static_cast<int>(Kind::kUnmapped));
  EXPECT_EQ(
      kind_seen_after(
          [] { return unshare(CLONE_NEWUSER) == 0 && refuse_netlink(); }),
      static_cast<int>(Kind::kUnmapped));
}

// ---- The store

std::string request(const wire::Message& message) {
  return wire::Message(wire::Query::kValidate).number(wire::kMagic).bytes() +
      message.bytes();
}

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

// ---- The client

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
          HasSubstr(kSlow)));
}

// ---- The secret

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
      AnyOf(HasSubstr("TESSERA_STORE_SECRET"), HasSubstr(kSlow)));
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
      AnyOf(HasSubstr("TESSERA_STORE_SECRET"), HasSubstr(kSlow)));
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
