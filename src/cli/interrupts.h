#pragma once

namespace tessera::cli {

/// While an Interrupts exists, the first SIGINT, SIGTERM or SIGHUP does not end
/// the process but is noted, so that incomplete files can be removed. A second
/// signal ends the process. At most one Interrupts may exist.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  /// Throws Interrupted if a signal has come.
  static void check();
};

/// Not a std::exception, so that no handler of errors catches it and goes on.
struct Interrupted {
  int signal = 0;
};

/// Ends this process by the signal, as it would have ended without Interrupts.
[[noreturn]] void end_by(Interrupted interrupted);

} // namespace tessera::cli
