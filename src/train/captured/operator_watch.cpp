#include "train/captured/operator_watch.h"

#include <ATen/core/ivalue.h>

#include <mutex>
#include <string_view>
#include <unordered_set>

namespace tessera::train {
namespace {

/// Callbacks are plain functions. Autograd's threads call them too.
struct Noted {
  std::mutex mutex;
  // Guarded by the mutex.
  std::string last;
  std::string first_user;
  std::vector<at::Tensor> tensors; // so that no other has their storages
  std::unordered_set<const c10::StorageImpl*> storages;

  void begin(const std::vector<at::Tensor>& watched) {
    const std::scoped_lock lock(mutex);
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
  bool is_watched(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.has_storage() &&
        storages.contains(tensor.storage().unsafeGetStorageImpl());
  }
  bool is_watched(const c10::IValue& argument) const {
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
  const std::scoped_lock lock(noted().mutex);
  return noted().last;
}

std::string OperatorWatch::first_user() const {
  const std::scoped_lock lock(noted().mutex);
  return noted().first_user;
}

std::unique_ptr<at::ObserverContext> OperatorWatch::note(
    const at::RecordFunction& function) {
  const std::scoped_lock lock(noted().mutex);
  noted().last = function.name();
  if (!noted().storages.empty() && noted().first_user.empty() &&
      reads_values(function.name())) {
    for (const c10::IValue& argument : function.inputs()) {
      if (noted().is_watched(argument)) {
        noted().first_user = function.name();
      }
    }
  }
  return nullptr;
}

} // namespace tessera::train
