#include "engine/owners.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace tessera::engine {
namespace {

/// Never destroyed: units may die in static destructors.
std::unordered_map<const c10::StorageImpl*, StorageOwner>& owners() {
  static auto& map =
      *new std::unordered_map<const c10::StorageImpl*, StorageOwner>;
  return map;
}

/// Models over different groups may live in different threads.
std::shared_mutex& owners_mutex() {
  static auto& mutex = *new std::shared_mutex;
  return mutex;
}

} // namespace

StorageOwner find_owner(const c10::StorageImpl* storage) {
  const std::shared_lock lock(owners_mutex());
  const auto found = owners().find(storage);
  return found == owners().end() ? StorageOwner{} : found->second;
}

void set_owner(const c10::StorageImpl* storage, const StorageOwner& owner) {
  const std::unique_lock lock(owners_mutex());
  owners()[storage] = owner;
}

void forget_owner(const c10::StorageImpl* storage) {
  const std::unique_lock lock(owners_mutex());
  owners().erase(storage);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

} // namespace tessera::engine
