#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/tools/progress_meter.h"

namespace tessera::cli {

/// Shows progress on stderr: a bar on a terminal, else a line at every tenth.
/// Prints nothing for work that is done at once.
class ProgressBar {
 public:
  /// `what`: for example "converting". `check` is called at every step of
  /// progress; an exception from it ends the work.
  explicit ProgressBar(std::string what, std::function<void()> check = {});
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  checkpoint::ProgressMeter& progress() {
    return progress_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void show(uint64_t done, uint64_t total);
  void draw(uint64_t done, uint64_t total);

  const std::string what_;
  const bool on_terminal_;
  Clock::time_point started_ = Clock::now();
  Clock::time_point drawn_{};
  uint64_t tenths_ = 0;
  bool has_bar_ = false;
  checkpoint::ProgressMeter progress_;
};

} // namespace tessera::cli
