#include "launch/frontend.h"

#include <poll.h>
#include <signal.h>

#include <vector>

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;

// Returns the interrupting signal, or 0.
int wait_once(Frontend* frontend, int timeout_ms) {
  std::vector<pollfd> fds{
      {.fd = frontend->signals.fd(), .events = POLLIN, .revents = 0}};
  frontend->console.add_to_poll(&fds);
  ::poll(fds.data(), fds.size(), timeout_ms);
  frontend->console.write_some();
  for (const signalfd_siginfo& info : frontend->signals.take()) {
    const int signal = static_cast<int>(info.ssi_signo);
    // Without ranks to pass it on to, a hangup ends the launcher as usual.
    if (is_interrupt(signal) || signal == SIGHUP) {
      return signal;
    }
    if (signal == SIGTSTP) {
      ::raise(SIGSTOP);
    }
  }
  return 0;
}

} // namespace

void Frontend::say(const std::string& message) {
  console.write(Stream::Stderr, "tessera run: " + message + "\n");
}

void Frontend::pause(std::chrono::milliseconds duration) {
  const Clock::time_point end = Clock::now() + duration;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) {
      return;
    }
    if (const int signal = wait_once(this, static_cast<int>(left.count()))) {
      throw Interrupted{.signal = signal};
    }
  }
}

int Frontend::flush() {
  console.write_some();
  while (console.pending()) {
    if (const int signal = wait_once(this, -1)) {
      return signal;
    }
  }
  return 0;
}

} // namespace tessera::launch
