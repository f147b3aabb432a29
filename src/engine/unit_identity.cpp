#include "engine/unit_identity.h"

#include <tessera/error.h>

#include <utility>

namespace tessera::engine {

UnitIdentity::UnitIdentity(
    std::string name,
    int number,
    const Groups& groups,
    const UnitOptions& options)
    : number_(number), groups_(groups), options_(options) {
  set_name(std::move(name));
}

void UnitIdentity::set_name(std::string name) {
  name_ = std::move(name);
  label_ = name_ + "#" + std::to_string(number_);
  raw_access_error_ = format_error(
      {.call = "data_ptr", .unit = name_},
      "raw access to a sharded parameter, which has no memory of its own now. Use operators, which gather it, or do this inside tessera::summon_full_params(module), torch::save too.");
}

void UnitIdentity::fail(
    const char* call,
    const std::string& parameter,
    const std::string& what) const {
  raise(
      {.call = call,
       .rank =
           groups_.all.global_ranks()[static_cast<size_t>(groups_.all.rank())],
       .unit = name_,
       .parameter = parameter},
      what);
}

void UnitIdentity::set_home(
    const void* module,
    std::weak_ptr<const void> alive) {
  home_ = module;
  is_home_tracked_ = !alive.expired();
  home_alive_ = std::move(alive);
}

void UnitIdentity::set_parent(std::shared_ptr<UnitIdentity> parent) {
  parent_ = std::move(parent);
  // A unit that was written since it was gathered stays stale: the root's count
  // must not be one that the unit has seen.
  root().writes_ += writes_;
}

bool UnitIdentity::contains(const UnitIdentity& other) const {
  for (const UnitIdentity* up = other.parent_.get(); up != nullptr;
       up = up->parent_.get()) {
    if (up == this) {
      return true;
    }
  }
  return false;
}

const UnitIdentity& UnitIdentity::root() const {
  const UnitIdentity* up = this;
  while (up->parent_) {
    up = up->parent_.get();
  }
  return *up;
}

} // namespace tessera::engine
