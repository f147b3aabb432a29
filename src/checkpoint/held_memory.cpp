#include "checkpoint/held_memory.h"

#include "base/mutex.h"
#include "libtorch/compat.h"

#if TESSERA_TORCH_AT_LEAST(2, 13)

#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera::checkpoint {

namespace {

/// Held for every change of a storage's memory. Never destroyed: tensors may
/// outlive everything else.
constinit Mutex blocks_mutex;

/// The memory of a storage and how to free it; empty once the storage has taken
/// its memory back.
struct Block {
  std::unique_ptr<void, c10::DeleterFnPtr> memory{nullptr, nullptr};
  int64_t num_holders TESSERA_GUARDED_BY(blocks_mutex) = 0;
};
using BlockPtr = std::shared_ptr<Block>;

class Holder {
 public:
  explicit Holder(BlockPtr block) TESSERA_REQUIRES(blocks_mutex)
      : block_(std::move(block)) {
    ++block_->num_holders;
  }
  ~Holder() {
    const MutexLock lock(blocks_mutex);
    --block_->num_holders;
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

 private:
  const BlockPtr block_; // is released after the mutex
};

/// The deleter of a storage that shares a block.
void release(void* context) {
  delete static_cast<BlockPtr*>(context);
}

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

/// Somebody is about to write: gives the storage memory of its own.
void materialize(c10::StorageImpl* storage) {
  const MutexLock lock(blocks_mutex);
  const c10::DataPtr& shared = storage->data_ptr();
  if (!is_held(shared)) {
    return; // another thread was faster, or the storage was given other memory
  }
  Block& block = **static_cast<BlockPtr*>(shared.get_context());
  c10::DataPtr own;
  if (block.num_holders > 0) {
    own = storage->allocator()->clone(shared.get(), storage->nbytes());
  } else {
    const c10::DeleterFnPtr deleter = block.memory.get_deleter();
    own = c10::DataPtr(
        shared.get(), block.memory.release(), deleter, shared.device());
  }
  storage->set_data_ptr_noswap(std::move(own)); // releases the block
}

/// Null if the memory cannot be shared.
BlockPtr block_of(c10::StorageImpl& storage) TESSERA_REQUIRES(blocks_mutex) {
  const c10::DataPtr& data = storage.data_ptr();
  if (is_held(data)) {
    return *static_cast<BlockPtr*>(data.get_context());
  }
  if (storage.has_materializer() || storage.allocator() == nullptr ||
      !c10::impl::cow::has_simple_data_ptr(storage)) {
    return nullptr;
  }
  auto block = std::make_shared<Block>();
  auto context = std::make_unique<BlockPtr>(block);
  block->memory = storage._mutable_data_ptr_no_checks().move_context();
  storage.set_data_ptr_noswap(
      c10::DataPtr(data.get(), context.release(), &release, data.device()));
  storage.set_materializer(&materialize);
  return block;
}

} // namespace

bool is_held(const c10::DataPtr& data) {
  return data.get_deleter() == &release;
}

std::optional<at::Tensor> hold(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.numel() == 0) {
    return std::nullopt;
  }
  std::shared_ptr<Holder> holder;
  {
    const MutexLock lock(blocks_mutex);
    BlockPtr block = block_of(storage_of(tensor));
    if (block == nullptr) {
      return std::nullopt;
    }
    holder = std::make_shared<Holder>(std::move(block));
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()),
      tensor.sizes(),
      [holder](void*) {},
      tensor.options().requires_grad(false));
}

} // namespace tessera::checkpoint

#else

namespace tessera::checkpoint {

bool is_held(const c10::DataPtr&) {
  return false;
}

std::optional<at::Tensor> hold(const at::Tensor&) {
  return std::nullopt;
}

} // namespace tessera::checkpoint

#endif
