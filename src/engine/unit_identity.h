// Who a unit is: its name, its ranks, and where it stands in its model.
#pragma once

#include <any>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/unit_options.h"

namespace tessera::engine {

/// The part of a Unit that has nothing to do with memory. The units of a model
/// form a tree, as their modules do.
///
/// Writes to shards are counted for all units of a model together, in the root:
/// which of its leaves a rank writes depends on what the rank has, but ranks
/// must gather again alike.
class UnitIdentity {
 public:
  /// `number` tells units of a group apart, the same on all ranks.
  UnitIdentity(
      std::string name,
      int number,
      const Groups& groups,
      const UnitOptions& options);
  UnitIdentity(const UnitIdentity&) = delete;
  UnitIdentity& operator=(const UnitIdentity&) = delete;

  const std::string& name() const {
    return name_;
  }
  void set_name(std::string name);
  int number() const {
    return number_;
  }
  /// Of collectives: name and number.
  const std::string& label() const {
    return label_;
  }
  /// What raw access to a parameter without memory says.
  const std::string& raw_access_error() const {
    return raw_access_error_;
  }
  const Groups& groups() const {
    return groups_;
  }
  const UnitOptions& options() const {
    return options_;
  }
  /// True where this rank has all of a copy, on the device it computes on.
  bool has_whole_copy() const {
    return groups_.shard.size() == 1 && !options_.offload;
  }
  /// Throws an error that names the unit.
  [[noreturn]] void fail(
      const char* call,
      const std::string& parameter,
      const std::string& what) const;

  /// The module that was sharded, to be recognized by; never followed. Null
  /// once it is gone: its address may be another's by then. `alive` is empty
  /// for a module that no shared_ptr owns.
  const void* home() const {
    return is_home_tracked_ && home_alive_.expired() ? nullptr : home_;
  }
  /// Null if the module is gone, or if no shared_ptr owns it.
  std::shared_ptr<const void> lock_home() const {
    return home_alive_.lock();
  }
  void set_home(const void* module, std::weak_ptr<const void> alive);

  /// The unit whose module contains this one's.
  void set_parent(std::shared_ptr<UnitIdentity> parent);
  bool is_root() const {
    return parent_ == nullptr;
  }
  bool contains(const UnitIdentity& other) const;
  /// The unit that contains this one and is contained in none.
  const UnitIdentity& root() const;

  /// Writes to shards of the whole model that were seen so far.
  int64_t num_writes() const {
    return root().writes_;
  }

  /// What the front end keeps with the unit; nothing to the unit itself.
  std::any& attachment() {
    return attachment_;
  }

 protected:
  ~UnitIdentity() = default;
  /// Several threads may call it at once.
  void add_write() {
    ++root().writes_;
  }

 private:
  // Constant after construction.
  const int number_;
  const Groups groups_;
  const UnitOptions options_;

  // Set while modules are sharded.
  std::string name_;
  std::string label_;
  std::string raw_access_error_;
  const void* home_ = nullptr;
  std::weak_ptr<const void> home_alive_;
  bool is_home_tracked_ = false;
  std::shared_ptr<UnitIdentity> parent_;

  // The front end's.
  std::any attachment_;

  // Any thread's.
  mutable std::atomic<int64_t> writes_ = 0; // a root's
};

} // namespace tessera::engine
