#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "settings.h"

namespace gpt {

/// The course of one training run.
struct Run {
  void record(double loss);

  std::vector<double> losses; // of the whole batch, one a step
  double seconds = 0; // for all steps
  int64_t parameter_bytes = 0; // held by one process between steps
  int64_t optimizer_bytes = 0;
  std::chrono::steady_clock::time_point started =
      std::chrono::steady_clock::now();
};

/// What the user sees. Rank 0 prints, on the others every call is silent. On a
/// terminal the last line shows progress and is overwritten; elsewhere there
/// are whole lines only, fewer of them.
class Report {
 public:
  Report(const Settings& settings, int rank, int num_ranks);

  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const;

  /// After each step: of the plain run, and later of the sharded one.
  void show_plain(const Run& plain) const;
  void show_sharded(const Run& sharded, const Run& plain) const;

  /// Memory and speed of both.
  void show_costs(const Run& sharded, const Run& plain) const;
  /// `text` with a bar in front, and dots for what cannot be printed.
  void show_text(const std::string& text) const;
  /// Says whether both runs learned, and the same. True if they did.
  bool judge(const Run& sharded, const Run& plain) const;

 private:
  void show_progress(const Run& run) const;

  const Settings settings_;
  const int num_ranks_;
  const bool prints_;
  const bool is_terminal_;
};

} // namespace gpt
