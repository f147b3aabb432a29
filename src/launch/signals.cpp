#include "launch/signals.h"

#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace tessera::launch {

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name
                         : "signal " + std::to_string(signal);
}

std::string describe_signal(int signal) {
  const char* text = sigdescr_np(signal);
  if (text == nullptr) {
    return signal_name(signal);
  }
  std::string description = text;
  description[0] = static_cast<char>(
      std::tolower(static_cast<unsigned char>(description[0])));
  return signal_name(signal) + " (" + description + ")";
}

sigset_t supervised_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kRunSignals) {
    sigaddset(&set, signal);
  }
  struct sigaction hangup;
  if (sigaction(SIGHUP, nullptr, &hangup) != 0 ||
      hangup.sa_handler != SIG_IGN) {
    sigaddset(&set, SIGHUP);
  }
  return set;
}

bool is_interrupt(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGQUIT;
}

void block_supervised_signals() {
  const sigset_t set = supervised_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

SignalGate::SignalGate() {
  const sigset_t set = supervised_signals();
  fd_ = UniqueFd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    throw std::system_error(
        errno, std::generic_category(), "[tessera run] signalfd");
  }
  pthread_sigmask(SIG_BLOCK, &set, &saved_mask_);
  rank_mask_ = saved_mask_;
  for (int signal = 1; signal < SIGRTMIN; ++signal) {
    if (sigismember(&set, signal) == 1) {
      sigdelset(&rank_mask_, signal);
    }
  }

  struct sigaction action = {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &saved_pipe_);
  // Where SIGCHLD is ignored the kernel reaps children by itself, and their
  // exit codes are lost.
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, &saved_child_);
}

SignalGate::~SignalGate() {
  // Unblocking with a second Ctrl-C pending would end the launcher before it
  // can return the run's exit code.
  take();
  sigaction(SIGPIPE, &saved_pipe_, nullptr);
  sigaction(SIGCHLD, &saved_child_, nullptr);
  pthread_sigmask(SIG_SETMASK, &saved_mask_, nullptr);
}

std::vector<signalfd_siginfo> SignalGate::take() {
  std::vector<signalfd_siginfo> result;
  std::array<signalfd_siginfo, 16> buffer;
  for (;;) {
    const ssize_t num_bytes = ::read(fd_.get(), buffer.data(), sizeof(buffer));
    if (num_bytes < 0 && errno == EINTR) {
      continue;
    }
    if (num_bytes <= 0) {
      return result;
    }
    const auto count = static_cast<ptrdiff_t>(num_bytes) /
        static_cast<ptrdiff_t>(sizeof(buffer[0]));
    result.insert(result.end(), buffer.begin(), buffer.begin() + count);
  }
}

} // namespace tessera::launch
