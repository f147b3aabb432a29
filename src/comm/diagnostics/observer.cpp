#include "comm/diagnostics/observer.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digits.h"
#include "base/mutex.h"

namespace tessera::comm {
namespace {

struct Observers {
  Mutex mutex; // held while an observer is told
  std::vector<std::shared_ptr<const CallObserver>> all
      TESSERA_GUARDED_BY(mutex);

  // Provide their own synchronization.
  std::atomic<size_t> count{0}; // all.size()
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
  Observers& known = observers();
  const MutexLock lock(known.mutex);
  known.all.push_back(observer_);
  known.count = known.all.size();
}

CallWatch::~CallWatch() {
  Observers& known = observers();
  const MutexLock lock(known.mutex);
  std::erase(known.all, observer_);
  known.count = known.all.size();
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
  Observers& known = observers();
  const MutexLock lock(known.mutex);
  for (const auto& observer : known.all) {
    (*observer)(event);
  }
}

const char* verb_of(const Call& call) {
  constexpr std::pair<std::string_view, const char*> kVerbs[] = {
      {"all_gather", "gather"},
      {"reduce_scatter", "reduce"},
      {"all_reduce", "reduce"},
      {"broadcast", "broadcast"},
      {"barrier", "barrier"},
      {"gather", "gather"},
      {"scatter", "scatter"},
      {"reduce", "reduce"},
      {"send", "send"},
      {"recv", "receive"}};
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
