#include "comm/diagnostics/observer.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digits.h"

namespace tessera::comm {
namespace {

struct Observers {
  std::mutex mutex; // held while one is told
  std::vector<std::shared_ptr<const CallObserver>> all; // guarded by mutex
  std::atomic<size_t> count{0}; // of all
  std::atomic<uint64_t> last_id{0};
};

/// Never destroyed: backends have threads that end after static destructors.
Observers& observers() {
  static auto& instance = *new Observers;
  return instance;
}

} // namespace

CallWatch::CallWatch(CallObserver observer)
    : observer_(std::make_shared<const CallObserver>(std::move(observer))) {
  const std::scoped_lock lock(observers().mutex);
  observers().all.push_back(observer_);
  observers().count = observers().all.size();
}

CallWatch::~CallWatch() {
  const std::scoped_lock lock(observers().mutex);
  std::erase(observers().all, observer_);
  observers().count = observers().all.size();
}

uint64_t next_watched_call() {
  return observers().count.load(std::memory_order_relaxed) == 0
      ? 0
      : ++observers().last_id;
}

void tell(const CallEvent& event) {
  if (event.id == 0) {
    return;
  }
  const std::scoped_lock lock(observers().mutex);
  for (const auto& observer : observers().all) {
    (*observer)(event);
  }
}

const char* verb_of(const Call& call) {
  constexpr std::pair<std::string_view, const char*> kVerbs[] = {
      {"all_gather", "gather"},
      {"reduce_scatter", "reduce"},
      {"all_reduce", "reduce"},
      {"broadcast", "broadcast"},
      {"barrier", "barrier"}};
  const std::string_view operation = call.operation;
  for (const auto& [prefix, verb] : kVerbs) {
    if (operation.starts_with(prefix)) {
      return verb;
    }
  }
  return "exchange";
}

std::string subject_of(const Call& call) {
  const std::string_view label = call.label;
  const size_t mark = label.rfind('#');
  if (mark != std::string_view::npos && is_digits(label.substr(mark + 1))) {
    return std::string(label.substr(0, mark));
  }
  return std::string(label.empty() ? call.operation : call.label);
}

} // namespace tessera::comm
