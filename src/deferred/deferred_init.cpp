#include <tessera/deferred/deferred_init.h>
#include <tessera/error.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <unordered_map>
#include <unordered_set>

#include "deferred/deferred_tensor.h"
#include "deferred/recorder.h"

namespace tessera {
namespace {

/// The deferred tensors of one storage, which get memory together.
struct StorageGroup {
  std::string name; // of one of them
  std::vector<at::Tensor> tensors;
};

class StorageGroups {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (!is_deferred(tensor) ||
        !seen_.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    if (tensor.grad_fn()) {
      raise(
          {.call = "materialize", .parameter = name},
          fmt::format(
              "this tensor has a gradient function ({}), which leads to tensors without memory. Compute it under torch::NoGradGuard, or register its detach().",
              tensor.grad_fn()->name()));
    }
    const auto [found, is_new] = by_storage_.try_emplace(
        tensor.storage().unsafeGetStorageImpl(), groups_.size());
    if (is_new) {
      groups_.push_back({name, {}});
    }
    groups_[found->second].tensors.push_back(tensor);
    // Autograd looks up a view through its base.
    if (tensor.is_view()) {
      add(name, at::Tensor(tensor._base()));
    }
    add(name, tensor.grad());
  }

  const std::vector<StorageGroup>& all() const {
    return groups_;
  }

 private:
  std::vector<StorageGroup> groups_;
  std::unordered_map<const c10::StorageImpl*, size_t> by_storage_;
  std::unordered_set<const c10::TensorImpl*> seen_;
};

void give_memory(const StorageGroup& group) {
  const auto tape = deferred::find_deferred(group.tensors.front())->tape;
  std::vector<deferred::TensorRef> refs;
  for (const at::Tensor& tensor : group.tensors) {
    refs.push_back(deferred::ref_to(tensor));
  }
  const auto real = tape->replay(refs);
  for (size_t i = 0; i < real.size(); ++i) {
    deferred::replace_data(group.tensors[i], real[i]);
  }
}

} // namespace

struct DeferredInit::Scope {
  std::shared_ptr<deferred::Tape> tape = deferred::current_tape();
  c10::impl::IncludeDispatchKeyGuard recording{deferred::kDeferredKey};
};

DeferredInit::DeferredInit() {
  deferred::enable_recording();
  scope_ = std::make_unique<Scope>();
}

DeferredInit::~DeferredInit() = default;

bool is_deferred(const at::Tensor& tensor) {
  return deferred::find_deferred(tensor) != nullptr;
}

void materialize(ModuleRef module) {
  StorageGroups groups;
  for (const auto& item : module->named_parameters()) {
    groups.add(item.key(), item.value());
  }
  for (const auto& item : module->named_buffers()) {
    groups.add(item.key(), item.value());
  }
  for (const StorageGroup& group : groups.all()) {
    try {
      give_memory(group);
    } catch (c10::Error& error) {
      error.add_context(format_error(
          {.call = "materialize", .parameter = group.name},
          "replaying the operators that made it failed."));
      throw;
    }
  }
}

} // namespace tessera
