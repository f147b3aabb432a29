#pragma once

namespace tessera::cli {

/// While it lives, the first SIGINT, SIGTERM or SIGHUP does not end the process
/// but is noted, so that what was being written can be removed. A second one
/// ends it. One at a time.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  /// Throws Interrupted if a signal has come.
  static void check();
};

/// Not a std::exception: nobody takes it for an error and goes on.
struct Interrupted {
  int signal = 0;
};

/// Ends this process by the signal, as it would have ended without Interrupts.
[[noreturn]] void end_by(Interrupted interrupted);

} // namespace tessera::cli
