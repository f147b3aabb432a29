#include "comm/diagnostics/current_call.h"

#include <atomic>
#include <charconv>
#include <chrono>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

enum class Phase { NoneYet, Inside, Outside };

// The latest collective of a thread, and whether the thread is still inside.
// Written by the thread, and read by a signal handler that runs on the thread.
// A handler that interrupts a write sees a mixture of two calls, which is
// harmless in a report.
struct LatestCall {
  std::atomic<Phase> phase{Phase::NoneYet};
  Call call;
  char group[64] = {};
  Clock::time_point since{}; // of the phase
};

LatestCall& latest_call() {
  constinit static thread_local LatestCall instance;
  return instance;
}

class Line {
 public:
  Line(char* text, size_t capacity) : at_(text), end_(text + capacity - 1) {}

  Line& operator<<(std::string_view text) {
    at_ += text.copy(at_, static_cast<size_t>(end_ - at_));
    return *this;
  }
  Line& operator<<(uint64_t number) {
    char digits[24];
    const auto result = std::to_chars(digits, digits + sizeof digits, number);
    return *this << std::string_view(
               digits, static_cast<size_t>(result.ptr - digits));
  }
  size_t finish(const char* text) {
    *at_ = '\0';
    return static_cast<size_t>(at_ - text);
  }

 private:
  char* at_;
  char* end_;
};

} // namespace

void note_call_begins(const Call& call, const char* group) {
  LatestCall& latest = latest_call();
  latest.phase.store(Phase::Outside, std::memory_order_relaxed);
  latest.call = call;
  assign(latest.group, group);
  latest.since = Clock::now();
  latest.phase.store(Phase::Inside, std::memory_order_release);
}

void note_call_ends() {
  LatestCall& latest = latest_call();
  latest.since = Clock::now();
  latest.phase.store(Phase::Outside, std::memory_order_release);
}

size_t describe_current_call(char* text, size_t capacity) {
  const LatestCall& latest = latest_call();
  Line line(text, capacity);
  const Phase phase = latest.phase.load(std::memory_order_acquire);
  switch (phase) {
    case Phase::NoneYet:
      line << "has made no collective yet";
      return line.finish(text);
    case Phase::Inside:
      line << "in ";
      break;
    case Phase::Outside:
      line << "in no collective; the last was ";
      break;
  }
  line << latest.call.operation;
  if (latest.call.detail[0] != '\0') {
    line << " of " << latest.call.detail;
  }
  if (latest.call.label[0] != '\0') {
    line << " for \"" << latest.call.label << "\"";
  }
  const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(
      Clock::now() - latest.since);
  const auto tenths = static_cast<uint64_t>(elapsed.count()) / 100;
  line << ", call #" << latest.call.sequence << ", group \"" << latest.group
       << "\", " << (phase == Phase::Inside ? "since " : "ended ")
       << tenths / 10 << "." << tenths % 10
       << (phase == Phase::Inside ? " s" : " s ago");
  return line.finish(text);
}

} // namespace tessera::comm
