#include "fsdp/open_forwards.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/mutex.h"

namespace tessera::fsdp {
namespace {

/// Models over different groups may live in different threads.
struct OpenForwards {
  Mutex mutex;
  /// Innermost last.
  std::vector<const engine::Unit*> units TESSERA_GUARDED_BY(mutex);
};

OpenForwards& open_forwards() {
  static auto& open = *new OpenForwards;
  return open;
}

} // namespace

void enter_forward(const engine::Unit& unit) {
  OpenForwards& open = open_forwards();
  const MutexLock lock(open.mutex);
  open.units.push_back(&unit);
}

void leave_forward(const engine::Unit& unit) {
  OpenForwards& open = open_forwards();
  const MutexLock lock(open.mutex);
  const auto last = std::find(open.units.rbegin(), open.units.rend(), &unit);
  if (last != open.units.rend()) {
    open.units.erase(std::next(last).base());
  }
}

bool in_forward(const engine::Unit& unit) {
  OpenForwards& open = open_forwards();
  const MutexLock lock(open.mutex);
  return std::ranges::any_of(open.units, [&](const engine::Unit* other) {
    return other == &unit || other->contains(unit) || unit.contains(*other);
  });
}

} // namespace tessera::fsdp
