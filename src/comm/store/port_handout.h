// The port of rank 0's store, for launchers that give none.
#pragma once

#include <string>
#include <thread>

#include "comm/store/store.h"

namespace tessera::comm {

/// Tells the processes of one job on one host which port rank 0 listens on, for
/// launchers that give no MASTER_PORT. The handout is an abstract Unix socket
/// named after the job: the socket has no file, answers only this user, and
/// vanishes with the process.
class PortHandout {
 public:
  PortHandout(const std::string& job_id, int port);
  ~PortHandout();
  PortHandout(const PortHandout&) = delete;
  PortHandout& operator=(const PortHandout&) = delete;

  /// Asks rank 0's handout, trying again until `timeout`.
  static int ask(const std::string& job_id, Milliseconds timeout);

 private:
  // Constant after construction.
  int listener_ = -1;
  int wake_ = -1; // eventfd: stops the thread
  std::thread thread_;
};

} // namespace tessera::comm
