#include "comm/shm/peer_processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::comm::shm {

PeerProcesses::PeerProcesses(const std::vector<pid_t>& pids) : pids_(pids) {
  for (pid_t pid : pids) {
    descriptors_.push_back(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  }
}

PeerProcesses::~PeerProcesses() {
  for (int fd : descriptors_) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

bool PeerProcesses::is_alive(int peer) const {
  const auto index = static_cast<size_t>(peer);
  if (descriptors_[index] < 0) {
    return kill(pids_[index], 0) == 0 || errno != ESRCH;
  }
  pollfd ended{descriptors_[index], POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

} // namespace tessera::comm::shm
