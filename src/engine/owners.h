// Finds the unit that a storage belongs to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace tessera::engine {

class Unit;

/// A unit owns storages of two kinds: those that its faces view (full
/// parameters) and those that its leaves view (shards).
struct StorageOwner {
  Unit* unit = nullptr;
  bool is_shard = false;
};

/// Returns no owner if no unit owns the storage.
StorageOwner find_owner(const c10::StorageImpl* storage);
void set_owner(const c10::StorageImpl* storage, const StorageOwner& owner);
void forget_owner(const c10::StorageImpl* storage);

c10::StorageImpl* storage_of(const at::Tensor& tensor);

} // namespace tessera::engine
