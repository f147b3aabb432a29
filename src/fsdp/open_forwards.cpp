#include "fsdp/open_forwards.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

namespace tessera::fsdp {
namespace {

struct OpenForwards {
  std::mutex
      mutex; // models over different groups may live in different threads
  std::vector<const engine::Unit*> units; // innermost last
};

OpenForwards& open_forwards() {
  static auto& open = *new OpenForwards;
  return open;
}

} // namespace

void enter_forward(const engine::Unit& unit) {
  const std::scoped_lock lock(open_forwards().mutex);
  open_forwards().units.push_back(&unit);
}

void leave_forward(const engine::Unit& unit) {
  const std::scoped_lock lock(open_forwards().mutex);
  auto& units = open_forwards().units;
  const auto last = std::find(units.rbegin(), units.rend(), &unit);
  if (last != units.rend()) {
    units.erase(std::next(last).base());
  }
}

bool in_forward(const engine::Unit& unit) {
  const std::scoped_lock lock(open_forwards().mutex);
  return std::ranges::any_of(
      open_forwards().units, [&](const engine::Unit* open) {
        return open == &unit || open->contains(unit) || unit.contains(*open);
      });
}

} // namespace tessera::fsdp
