#include "engine/plain_params.h"

#include <c10/core/UndefinedTensorImpl.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/fnv.h"
#include "base/mutex.h"

namespace tessera::engine {
namespace {

using WeakParam =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Registry {
  struct Place {
    AveragedParams* owner;
    size_t index; // among its parameters
  };

  Mutex mutex;
  std::unordered_multimap<const c10::TensorImpl*, Place> averaged
      TESSERA_GUARDED_BY(mutex);
  std::unordered_map<const c10::TensorImpl*, WeakParam> ignored
      TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: models may die in static destructors.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

thread_local int num_unnoted = 0;

} // namespace

uint64_t StepsMade::digest() const {
  uint64_t digest = kFnvStart;
  for (const bool stepped : was_stepped) {
    digest = mix_digest(digest, uint64_t{stepped ? 2U : 1U});
  }
  return digest;
}

AveragedParams::AveragedParams(std::vector<at::Tensor> params)
    : params_(std::move(params)) {
  steps_.was_stepped.resize(params_.size());
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  for (size_t i = 0; i < params_.size(); ++i) {
    all.averaged.emplace(
        params_[i].unsafeGetTensorImpl(), Registry::Place{this, i});
  }
}

AveragedParams::~AveragedParams() {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  std::erase_if(all.averaged, [this](const auto& entry) {
    return entry.second.owner == this;
  });
}

StepsMade AveragedParams::steps() const {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  return steps_;
}

void AveragedParams::set_steps(const StepsMade& steps) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  steps_ = steps;
}

void AveragedParams::restart_count() {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  steps_.since_restart = 0;
}

void AveragedParams::set_counting(bool on) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  steps_.is_counting = on;
}

bool is_averaged(const at::Tensor& param) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  return all.averaged.contains(param.unsafeGetTensorImpl());
}

bool is_any_averaged() {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  return !all.averaged.empty();
}

void note_step(const std::vector<at::Tensor>& params) {
  if (num_unnoted > 0) {
    return;
  }
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  std::unordered_set<AveragedParams*> counted;
  for (const at::Tensor& param : params) {
    const auto [begin, end] =
        all.averaged.equal_range(param.unsafeGetTensorImpl());
    for (auto place = begin; place != end; ++place) {
      auto& [owner, index] = place->second;
      if (!owner->steps_.is_counting) {
        continue;
      }
      owner->steps_.was_stepped[index] = true;
      if (counted.insert(owner).second) {
        ++owner->steps_.since_restart;
      }
    }
  }
}

UnnotedSteps::UnnotedSteps() {
  ++num_unnoted;
}

UnnotedSteps::~UnnotedSteps() {
  --num_unnoted;
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
