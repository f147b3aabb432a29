#include "shard/owners.h"

#include <unordered_map>

namespace tessera::shard {
namespace {

/// Never destroyed: units may die in static destructors.
std::unordered_map<const c10::StorageImpl*, StorageOwner>& owners() {
  static auto& map =
      *new std::unordered_map<const c10::StorageImpl*, StorageOwner>;
  return map;
}

} // namespace

StorageOwner find_owner(const c10::StorageImpl* storage) {
  const auto found = owners().find(storage);
  return found == owners().end() ? StorageOwner{} : found->second;
}

void set_owner(const c10::StorageImpl* storage, const StorageOwner& owner) {
  owners()[storage] = owner;
}

void forget_owner(const c10::StorageImpl* storage) {
  owners().erase(storage);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

} // namespace tessera::shard
