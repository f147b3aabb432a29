#include "engine/plain_params.h"

#include <c10/core/UndefinedTensorImpl.h>

#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace tessera::engine {
namespace {

using WeakParam =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Registry {
  Mutex mutex;
  /// How often.
  std::unordered_map<const c10::TensorImpl*, int> averaged
      TESSERA_GUARDED_BY(mutex);
  std::unordered_map<const c10::TensorImpl*, WeakParam> ignored
      TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: models may die in static destructors.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

} // namespace

AveragedParams::AveragedParams(std::vector<at::Tensor> params)
    : params_(std::move(params)) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  for (const at::Tensor& param : params_) {
    ++all.averaged[param.unsafeGetTensorImpl()];
  }
}

AveragedParams::~AveragedParams() {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  for (const at::Tensor& param : params_) {
    const auto found = all.averaged.find(param.unsafeGetTensorImpl());
    if (--found->second == 0) {
      all.averaged.erase(found);
    }
  }
}

bool is_averaged(const at::Tensor& param) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  return all.averaged.contains(param.unsafeGetTensorImpl());
}

void set_ignored(const at::Tensor& param) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  std::erase_if(
      all.ignored, [](const auto& entry) { return entry.second.expired(); });
  all.ignored.insert_or_assign(
      param.unsafeGetTensorImpl(), WeakParam(param.getIntrusivePtr()));
}

bool is_ignored(const at::Tensor& param) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  const auto found = all.ignored.find(param.unsafeGetTensorImpl());
  return found != all.ignored.end() && !found->second.expired();
}

} // namespace tessera::engine
