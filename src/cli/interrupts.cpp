#include "cli/interrupts.h"

#include <array>
#include <csignal>
#include <cstdlib>

namespace tessera::cli {
namespace {

constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGHUP};

volatile std::sig_atomic_t noted = 0;
std::array<struct sigaction, kSignals.size()> before;

void note(int signal) {
  noted = signal;
}

} // namespace

Interrupts::Interrupts() {
  noted = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &before[i]);
    if (before[i].sa_handler != SIG_IGN) { // nohup
      ::sigaction(kSignals[i], &action, nullptr);
    }
  }
}

Interrupts::~Interrupts() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &before[i], nullptr);
  }
}

void Interrupts::check() {
  if (noted != 0) {
    throw Interrupted{noted};
  }
}

void end_by(Interrupted interrupted) {
  std::signal(interrupted.signal, SIG_DFL);
  std::raise(interrupted.signal);
  std::_Exit(128 + interrupted.signal);
}

} // namespace tessera::cli
