// What a unit began with, until the ranks have compared it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/bundle.h"

namespace tessera::engine {

/// The digests of a unit's parameters; see [Note: equal starts] in start.h.
///
/// Thread safety: any thread may call is_open() and note_written(). The other
/// functions belong to the thread that runs the model.
class UnitStart {
 public:
  struct Param {
    std::string name;
    uint64_t digest = 0;
    bool was_written = false; // since, as far as this rank knows
  };

  /// Not open: there is nothing to compare.
  explicit UnitStart(bool is_open) : is_open_(is_open) {}

  /// The ranks have yet to compare.
  bool is_open() const {
    const MutexLock lock(mutex_);
    return is_open_;
  }
  /// By bundle, and in a bundle by index.
  std::vector<Param> params() const {
    const MutexLock lock(mutex_);
    return params_;
  }
  void add(const std::string& name, uint64_t digest);
  /// The parameters that `written` overlaps no longer have the values that the
  /// rank began with. `written` is a view of a bundle's shard; undefined: all
  /// shards. `rank` is this rank's in the group of the shards.
  void note_written(
      const std::vector<Bundle>& bundles,
      int rank,
      const at::Tensor& written);
  /// The ranks have compared.
  void close();

 private:
  mutable Mutex mutex_;
  bool is_open_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Param> params_ TESSERA_GUARDED_BY(mutex_);
};

} // namespace tessera::engine
