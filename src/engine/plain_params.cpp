#include "engine/plain_params.h"

#include <c10/core/UndefinedTensorImpl.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera::engine {
namespace {

using WeakParam =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, int> averaged; // how often
  std::unordered_map<const c10::TensorImpl*, WeakParam> ignored;
};

/// Never destroyed: models may die in static destructors.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

} // namespace

AveragedParams::AveragedParams(std::vector<at::Tensor> params)
    : params_(std::move(params)) {
  const std::scoped_lock lock(registry().mutex);
  for (const at::Tensor& param : params_) {
    ++registry().averaged[param.unsafeGetTensorImpl()];
  }
}

AveragedParams::~AveragedParams() {
  const std::scoped_lock lock(registry().mutex);
  for (const at::Tensor& param : params_) {
    const auto found = registry().averaged.find(param.unsafeGetTensorImpl());
    if (--found->second == 0) {
      registry().averaged.erase(found);
    }
  }
}

bool is_averaged(const at::Tensor& param) {
  const std::scoped_lock lock(registry().mutex);
  return registry().averaged.contains(param.unsafeGetTensorImpl());
}

void set_ignored(const at::Tensor& param) {
  const std::scoped_lock lock(registry().mutex);
  std::erase_if(registry().ignored, [](const auto& entry) {
    return entry.second.expired();
  });
  registry().ignored.insert_or_assign(
      param.unsafeGetTensorImpl(), WeakParam(param.getIntrusivePtr()));
}

bool is_ignored(const at::Tensor& param) {
  const std::scoped_lock lock(registry().mutex);
  const auto found = registry().ignored.find(param.unsafeGetTensorImpl());
  return found != registry().ignored.end() && !found->second.expired();
}

} // namespace tessera::engine
