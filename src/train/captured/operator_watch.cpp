#include "train/captured/operator_watch.h"

#include <ATen/core/ivalue.h>

#include <string_view>
#include <unordered_set>

#include "base/mutex.h"

namespace tessera::train {
namespace {

/// Callbacks are plain functions. Autograd's threads call them too.
struct Noted {
  Mutex mutex;
  std::string last TESSERA_GUARDED_BY(mutex);
  std::string first_user TESSERA_GUARDED_BY(mutex);
  /// Kept, so that no other has their storages.
  std::vector<at::Tensor> tensors TESSERA_GUARDED_BY(mutex);
  std::unordered_set<const c10::StorageImpl*> storages
      TESSERA_GUARDED_BY(mutex);

  void begin(const std::vector<at::Tensor>& watched) {
    const MutexLock lock(mutex);
    last.clear();
    first_user.clear();
    tensors = watched;
    storages.clear();
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        storages.insert(tensor.storage().unsafeGetStorageImpl());
      }
    }
  }
  bool is_watched(const at::Tensor& tensor) const TESSERA_REQUIRES(mutex) {
    return tensor.defined() && tensor.has_storage() &&
        storages.contains(tensor.storage().unsafeGetStorageImpl());
  }
  bool is_watched(const c10::IValue& argument) const TESSERA_REQUIRES(mutex) {
    if (argument.isTensor()) {
      return is_watched(argument.toTensor());
    }
    if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        if (is_watched(tensor)) {
          return true;
        }
      }
    }
    return false;
  }
};
Noted& noted() {
  static auto& instance = *new Noted;
  return instance;
}

/// detach() and the like look at no values. Autograd's own have no "aten::".
bool reads_values(std::string_view name) {
  constexpr std::string_view kNamespace = "aten::";
  if (name.starts_with(kNamespace)) {
    name.remove_prefix(kNamespace.size());
  }
  return name != "detach" && name != "detach_" && name != "alias" &&
      name != "view" && name != "is_same_size";
}

} // namespace

OperatorWatch::OperatorWatch(const std::vector<at::Tensor>& tensors) {
  noted().begin(tensors);
  handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&note)
                                      .needsInputs(!tensors.empty())
                                      .scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
  noted().begin({});
}

std::string OperatorWatch::last() const {
  Noted& now = noted();
  const MutexLock lock(now.mutex);
  return now.last;
}

std::string OperatorWatch::first_user() const {
  Noted& now = noted();
  const MutexLock lock(now.mutex);
  return now.first_user;
}

std::unique_ptr<at::ObserverContext> OperatorWatch::note(
    const at::RecordFunction& function) {
  Noted& now = noted();
  const MutexLock lock(now.mutex);
  now.last = function.name();
  if (!now.storages.empty() && now.first_user.empty() &&
      reads_values(function.name())) {
    for (const c10::IValue& argument : function.inputs()) {
      if (now.is_watched(argument)) {
        now.first_user = function.name();
      }
    }
  }
  return nullptr;
}

} // namespace tessera::train
