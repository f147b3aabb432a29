#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gpt {

/// What the user sees of a run. Rank 0 prints; on other ranks every call is
/// silent. On a terminal the last line shows progress and is overwritten, also
/// under `tessera run`; elsewhere complete lines are printed now and then.
class Live {
 public:
  /// Prints to `out`, stdout or stderr.
  Live(int rank, int64_t steps, std::FILE* out);
  ~Live();
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;

  /// Lines that stay.
  void print(const std::string& text);
  /// The same for text that a model wrote, with a bar in front, and dots for
  /// characters that do not belong on a terminal.
  void print_written(const std::string& text);

  struct Progress {
    int64_t step = 0; // done
    double loss = 0;
    double lr = 0;
    double grad_norm = 0;
    double tokens_per_second = 0;
    int64_t memory_bytes = 0; // of this rank
    std::optional<double> mfu;
    std::optional<double> loss_scale; // of float16
    int64_t num_skipped = 0; // steps, by the scaler
  };
  void show(const Progress& progress);

 private:
  using Clock = std::chrono::steady_clock;

  std::string line(const Progress& progress) const;
  std::string time_left(int64_t step) const;
  void write_live(const std::string& text);

  const bool prints_;
  std::FILE* const out_;
  const bool is_terminal_;
  const bool under_launcher_;
  const int64_t steps_;
  // The time of the first step that was shown: the pace is measured from there.
  Clock::time_point started_{};
  int64_t first_step_ = -1;
  Clock::time_point shown_at_{};
  bool has_line_ = false;
};

} // namespace gpt
