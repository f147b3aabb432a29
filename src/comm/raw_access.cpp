#include "comm/raw_access.h"

#include <atomic>

namespace tessera::comm {
namespace {

std::atomic<RawAccessWatcher> the_watcher = nullptr;

void tell(const at::Tensor& tensor, RawAccess access, const char* call) {
  if (const auto watcher = the_watcher.load(std::memory_order_acquire)) {
    watcher(tensor, access, call);
  }
}

} // namespace

void before_raw_read(const at::Tensor& tensor, const char* call) {
  tell(tensor, RawAccess::Read, call);
}

void before_raw_write(const at::Tensor& tensor, const char* call) {
  tell(tensor, RawAccess::Write, call);
}

void set_raw_access_watcher(RawAccessWatcher watcher) {
  the_watcher.store(watcher, std::memory_order_release);
}

} // namespace tessera::comm
