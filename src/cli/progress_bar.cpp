#include "cli/progress_bar.h"

#include <unistd.h>

#include <iostream>
#include <utility>

#include "base/text.h"

namespace tessera::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr auto kBetweenBars = std::chrono::milliseconds(100);
/// Without a terminal, smaller checkpoints get no line.
constexpr uint64_t kSmallBytes = 100'000'000;

std::string rate_text(uint64_t done, double seconds) {
  return seconds > 0 ? ", " +
          bytes_text(static_cast<uint64_t>(
              static_cast<double>(done) / seconds)) +
          "/s"
                     : "";
}

} // namespace

ProgressBar::ProgressBar(std::string what, std::function<void()> check)
    : what_(std::move(what)),
      on_terminal_(::isatty(STDERR_FILENO) == 1),
      progress_(
          [this, check = std::move(check)](uint64_t done, uint64_t total) {
            if (check) {
              check();
            }
            show(done, total);
          }) {}

ProgressBar::~ProgressBar() {
  if (has_bar_) {
    std::cerr << "\r\x1b[K" << std::flush;
  }
}

void ProgressBar::show(uint64_t done, uint64_t total) {
  if (total == 0) {
    return;
  }
  if (on_terminal_) {
    if (Clock::now() - drawn_ >= kBetweenBars) {
      draw(done, total);
    }
  } else if (total >= kSmallBytes && done * 10 / total > tenths_) {
    tenths_ = done * 10 / total;
    const std::chrono::duration<double> seconds = Clock::now() - started_;
    std::cerr << what_ << ": " << bytes_text(done) << " of "
              << bytes_text(total) << rate_text(done, seconds.count())
              << std::endl;
  }
}

void ProgressBar::draw(uint64_t done, uint64_t total) {
  has_bar_ = true;
  drawn_ = Clock::now();
  const std::chrono::duration<double> seconds = drawn_ - started_;
  const auto filled = static_cast<size_t>(
      static_cast<double>(done) / static_cast<double>(total) * kBarWidth);
  std::string bar(filled, '#');
  bar.resize(kBarWidth, '.');
  std::cerr << "\r" << what_ << " [" << bar << "] " << bytes_text(done)
            << " of " << bytes_text(total) << rate_text(done, seconds.count())
            << "\x1b[K" << std::flush;
}

} // namespace tessera::cli
