// Whether the processes of the other ranks are alive.
#pragma once

#include <sys/types.h>

#include <vector>

namespace tessera::comm::shm {

/// Watches processes by descriptors (pidfd), which see an end at once, zombies
/// included, and are never fooled by a process number that was given again.
class PeerProcesses {
 public:
  /// `pids` of the same process namespace, all alive now.
  explicit PeerProcesses(const std::vector<pid_t>& pids);
  ~PeerProcesses();
  PeerProcesses(const PeerProcesses&) = delete;
  PeerProcesses& operator=(const PeerProcesses&) = delete;

  bool is_alive(int peer) const;

 private:
  // Constant after construction.
  std::vector<pid_t> pids_;
  std::vector<int> descriptors_; // -1 where the kernel has no pidfd
};

} // namespace tessera::comm::shm
