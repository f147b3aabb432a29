#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <numeric>

namespace gpt {
namespace {

constexpr int64_t kTableRows = 15;
constexpr int64_t kProgressLines = 5;
constexpr double kBarWidth = 30; // of the first loss
constexpr size_t kTextWidth = 70;
constexpr double kMustFallTo = 0.95; // times the first loss

/// True for the first step, the last, and about `times` in between.
bool is_due(int64_t step, int64_t steps, int64_t times) {
  const int64_t every = std::max<int64_t>(1, steps / times);
  return step == 1 || step == steps || step % every == 0;
}

double relative_difference(double ours, double theirs) {
  return std::abs(ours - theirs) / std::abs(theirs);
}

double mean_of_last_quarter(const std::vector<double>& losses) {
  const auto count = std::max<std::ptrdiff_t>(1, std::ssize(losses) / 4);
  return std::accumulate(losses.end() - count, losses.end(), 0.0) /
      static_cast<double>(count);
}

std::string bar(double loss, double first_loss) {
  const double width = kBarWidth * loss / first_loss;
  // Written so that a loss which is no number has no bar.
  return std::string(width > 0 ? std::lround(std::min(width, 40.0)) : 0, '#');
}

double megabytes(int64_t bytes) {
  return static_cast<double>(bytes) / 1e6;
}

} // namespace

void Run::record(double loss) {
  losses.push_back(loss);
  const auto now = std::chrono::steady_clock::now();
  seconds = std::chrono::duration<double>(now - started).count();
}

Report::Report(const Settings& settings, int rank, int num_ranks)
    : settings_(settings),
      num_ranks_(num_ranks),
      prints_(rank == 0),
      is_terminal_(::isatty(STDOUT_FILENO) != 0) {}

void Report::print(const char* format, ...) const {
  if (!prints_) {
    return;
  }
  if (is_terminal_) {
    std::fputs("\r\033[K", stdout); // wipes the progress away
  }
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

void Report::show_progress(const Run& run) const {
  const auto done = std::ssize(run.losses);
  const auto left = static_cast<double>(settings_.steps - done);
  print(
      "   step %3ld of %ld, loss %.3f, %.0f s left",
      done,
      settings_.steps,
      run.losses.back(),
      std::ceil(run.seconds / static_cast<double>(done) * left));
  if (prints_ && is_terminal_ && done < settings_.steps) {
    std::fputs("\033[A", stdout); // back up: the next line replaces this one
    std::fflush(stdout);
  }
}

void Report::show_plain(const Run& plain) const {
  const auto step = std::ssize(plain.losses);
  if (is_terminal_ || is_due(step, settings_.steps, kProgressLines)) {
    show_progress(plain);
  }
}

void Report::show_sharded(const Run& sharded, const Run& plain) const {
  if (!prints_) {
    return; // other ranks have no plain run to show
  }
  const auto step = std::ssize(sharded.losses);
  if (step == 1) {
    print("   step    plain  sharded  difference  loss");
  }
  if (is_due(step, settings_.steps, kTableRows)) {
    const double ours = sharded.losses.back();
    const double theirs = plain.losses.at(static_cast<size_t>(step - 1));
    print(
        "   %4ld  %7.4f  %7.4f  %10.1e  %s",
        step,
        theirs,
        ours,
        relative_difference(ours, theirs),
        bar(ours, plain.losses.front()).c_str());
  }
  if (is_terminal_ && step < settings_.steps) {
    show_progress(sharded);
  }
}

void Report::show_costs(const Run& sharded, const Run& plain) const {
  const auto num_tokens =
      static_cast<double>(settings_.steps * settings_.batch * settings_.length);
  print("\n                             plain   each of %d", num_ranks_);
  print(
      "   parameters, at rest   %6.2f MB   %6.2f MB",
      megabytes(plain.parameter_bytes),
      megabytes(sharded.parameter_bytes));
  print(
      "   optimizer's state     %6.2f MB   %6.2f MB",
      megabytes(plain.optimizer_bytes),
      megabytes(sharded.optimizer_bytes));
  print(
      "   tokens/s              %9.0f   %9.0f together",
      num_tokens / plain.seconds,
      num_tokens / sharded.seconds);
}

void Report::show_text(const std::string& text) const {
  std::string line;
  for (const char byte : text + '\n') {
    if (byte != '\n') {
      line += byte >= ' ' && byte <= '~' ? byte : '.';
    }
    if (byte == '\n' || line.size() == kTextWidth) {
      print("   | %s", line.c_str());
      line.clear();
    }
  }
}

bool Report::judge(const Run& sharded, const Run& plain) const {
  // Comparisons are written so that a loss which is no number is wrong.
  double worst = 0;
  for (size_t i = 0; i < plain.losses.size() && !std::isnan(worst); ++i) {
    const double difference =
        relative_difference(sharded.losses.at(i), plain.losses[i]);
    worst = difference <= worst ? worst : difference;
  }
  const bool is_same = worst <= settings_.tolerance;
  const double first = sharded.losses.front();
  const double last = mean_of_last_quarter(sharded.losses);
  const bool fell = last < kMustFallTo * first;
  print(
      "\n%s: losses differ from the plain run's by %.1e at most (allowed: %.0e).",
      is_same ? "ok" : "WRONG",
      worst,
      settings_.tolerance);
  print(
      "%s: the loss %s, from %.2f to %.2f in the last quarter.",
      fell ? "ok" : "WRONG",
      fell ? "fell" : "did not fall by 5 %",
      first,
      last);
  return is_same && fell;
}

} // namespace gpt
