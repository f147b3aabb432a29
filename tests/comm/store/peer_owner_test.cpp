#include "comm/store/peer_owner.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/processes.h"
#include "comm/store/sockets.h"

namespace tessera::comm {
namespace {

using Kind = PeerOwner::Kind;

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

} // namespace
} // namespace tessera::comm
