#include "engine/owners.h"

#include <unordered_map>

#include "base/mutex.h"

namespace tessera::engine {
namespace {

/// Models over different groups may live in different threads.
struct Owners {
  SharedMutex mutex;
  std::unordered_map<const c10::StorageImpl*, StorageOwner> by_storage
      TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: units may die in static destructors.
Owners& owners() {
  static auto& instance = *new Owners;
  return instance;
}

} // namespace

StorageOwner find_owner(const c10::StorageImpl* storage) {
  Owners& all = owners();
  const ReaderLock lock(all.mutex);
  const auto found = all.by_storage.find(storage);
  return found == all.by_storage.end() ? StorageOwner{} : found->second;
}

void set_owner(const c10::StorageImpl* storage, const StorageOwner& owner) {
  Owners& all = owners();
  const WriterLock lock(all.mutex);
  all.by_storage[storage] = owner;
}

void forget_owner(const c10::StorageImpl* storage) {
  Owners& all = owners();
  const WriterLock lock(all.mutex);
  all.by_storage.erase(storage);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

} // namespace tessera::engine
