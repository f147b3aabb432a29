#pragma once

#include <chrono>
#include <string>

#include "launch/console.h"
#include "launch/signals.h"

namespace tessera::launch {

/// The user asked for the run to end while no rank was running.
struct Interrupted {
  int signal = 0;
};

/// The launcher's side towards its user: signals in, lines out.
struct Frontend {
  Frontend(int out_fd, int err_fd) : console(out_fd, err_fd) {}

  /// Writes "tessera run: <message>" and a newline to standard error. Lines
  /// after the first are the message's own.
  void say(const std::string& message);
  /// Waits, writing what is pending. Throws Interrupted.
  void pause(std::chrono::milliseconds duration);
  /// Waits until everything has been written or the reader went away: 0; or
  /// until the user interrupts: the signal.
  int flush();

  SignalGate signals;
  Console console;
};

} // namespace tessera::launch
