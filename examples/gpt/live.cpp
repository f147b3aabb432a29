#include "live.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace gpt {
namespace {

constexpr int kBarWidth = 12;
constexpr auto kBetweenFrames = std::chrono::milliseconds(100);
constexpr auto kBetweenLines = std::chrono::seconds(5);

std::string bar(double share) {
  const auto done = static_cast<int>(std::clamp(share, 0.0, 1.0) * kBarWidth);
  return std::string(static_cast<size_t>(done), '#') +
      std::string(static_cast<size_t>(kBarWidth - done), '.');
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  char text[32];
  if (whole < 60) {
    std::snprintf(text, sizeof(text), "%lds", whole);
  } else if (whole < 3600) {
    std::snprintf(text, sizeof(text), "%ldm%02lds", whole / 60, whole % 60);
  } else {
    std::snprintf(
        text, sizeof(text), "%ldh%02ldm", whole / 3600, whole % 3600 / 60);
  }
  return text;
}

std::string mfu_text(const std::optional<double>& mfu) {
  if (!mfu) {
    return "";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "  mfu %.1f%%", 100 * *mfu);
  return text;
}

/// Behind the norm of the gradients, which is not finite where a step is
/// skipped.
std::string scale_text(const Live::Progress& progress) {
  if (!progress.loss_scale) {
    return "";
  }
  char text[64];
  std::snprintf(text, sizeof(text), "  scale %.0f", *progress.loss_scale);
  return progress.num_skipped == 0
      ? text
      : text + (", " + std::to_string(progress.num_skipped)) + " skipped";
}

} // namespace

Live::Live(int rank, int64_t steps, std::FILE* out)
    : prints_(rank == 0),
      out_(out),
      is_terminal_(::isatty(::fileno(out)) == 1),
      under_launcher_(std::getenv("TESSERA_LIVE") != nullptr),
      steps_(steps) {}

Live::~Live() {
  if (has_line_) {
    write_live("");
  }
}

void Live::print(const std::string& text) {
  if (!prints_) {
    return;
  }
  if (has_line_ && !under_launcher_) {
    write_live("");
  }
  std::fputs((text + "\n").c_str(), out_);
  std::fflush(out_);
}

void Live::print_written(const std::string& text) {
  std::string shown = "  | ";
  for (const char byte : text) {
    if (byte == '\n') {
      shown += "\n  | ";
    } else {
      shown += (byte >= ' ' && byte <= '~') || byte == '\t' ? byte : '.';
    }
  }
  print(shown);
}

void Live::show(const Progress& progress) {
  if (!prints_) {
    return;
  }
  const bool is_live = is_terminal_ || under_launcher_;
  const bool is_last = progress.step == steps_;
  const auto now = Clock::now();
  if (first_step_ < 0) {
    first_step_ = progress.step;
    started_ = now;
  }
  const bool is_due =
      now - shown_at_ >= (is_live ? Clock::duration(kBetweenFrames)
                                  : Clock::duration(kBetweenLines));
  if (!is_due && !is_last) {
    return;
  }
  shown_at_ = now;
  if (is_live && !is_last) {
    write_live(line(progress));
    has_line_ = true;
  } else {
    if (has_line_) {
      write_live("");
    }
    print(line(progress));
  }
}

std::string Live::time_left(int64_t step) const {
  if (step == first_step_ || step == steps_) {
    return "";
  }
  const std::chrono::duration<double> passed = Clock::now() - started_;
  const double seconds_a_step =
      passed.count() / static_cast<double>(step - first_step_);
  return "  " + duration(seconds_a_step * static_cast<double>(steps_ - step)) +
      " left";
}

std::string Live::line(const Progress& progress) const {
  char text[256];
  std::snprintf(
      text,
      sizeof(text),
      "step %ld/%ld [%s]%s  loss %.4f  grad %.2f%s  %.1fk tok/s%s  %.0f MB  "
      "lr %.1e",
      progress.step,
      steps_,
      bar(static_cast<double>(progress.step) / static_cast<double>(steps_))
          .c_str(),
      time_left(progress.step).c_str(),
      progress.loss,
      std::abs(progress.grad_norm), // no "-nan"
      scale_text(progress).c_str(),
      progress.tokens_per_second / 1e3,
      mfu_text(progress.mfu).c_str(),
      static_cast<double>(progress.memory_bytes) / 1e6,
      progress.lr);
  return text;
}

/// By this prefix `tessera run` knows that the next line replaces this one.
void Live::write_live(const std::string& text) {
  std::fputs(("\r\033[K" + text + (under_launcher_ ? "\n" : "")).c_str(), out_);
  std::fflush(out_);
  has_line_ = !text.empty();
}

} // namespace gpt
