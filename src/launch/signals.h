#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include <array>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace tessera::launch {

/// "SIGTERM" for 15; "signal 40" where there is no name.
std::string signal_name(int signal);

/// "SIGSEGV (segmentation fault)".
std::string describe_signal(int signal);

/// The signals that a run always takes for its ranks.
inline constexpr std::array kRunSignals{
    SIGINT,
    SIGTERM,
    SIGQUIT,
    SIGUSR1,
    SIGUSR2,
    SIGTSTP,
    SIGCONT,
    SIGCHLD};

/// The signals a run takes for its ranks: INT, TERM, QUIT, HUP, USR1, USR2,
/// TSTP, CONT and CHLD. HUP is left out where it is ignored, as under nohup.
sigset_t supervised_signals();

/// Whether the signal asks for the whole run to end (INT, TERM, QUIT).
bool is_interrupt(int signal);

/// Blocks the supervised signals in the calling thread and in threads that it
/// starts later. A launcher that has threads calls this in main before the
/// first of them: a thread that leaves them unblocked would take them away
/// from the run.
void block_supervised_signals();

/// While it lives: the supervised signals are blocked in the calling thread
/// and arrive in fd(), SIGPIPE is ignored, SIGCHLD has its default action.
/// The destructor drops what has not been taken and restores all three.
class SignalGate {
 public:
  SignalGate();
  ~SignalGate();
  SignalGate(const SignalGate&) = delete;
  SignalGate& operator=(const SignalGate&) = delete;

  /// Readable when take() has something.
  int fd() const {
    return fd_.get();
  }
  /// The signals that have arrived, oldest of each kind. Does not block.
  std::vector<signalfd_siginfo> take();
  /// The mask for ranks: the caller's, without the supervised signals.
  const sigset_t& rank_mask() const {
    return rank_mask_;
  }

 private:
  UniqueFd fd_;
  sigset_t saved_mask_;
  sigset_t rank_mask_;
  struct sigaction saved_pipe_;
  struct sigaction saved_child_;
};

} // namespace tessera::launch
