// What the files of Unit share.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/unit.h"

namespace tessera::engine {

using WeakFace =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// One parameter of the unit. Its position in params_ is its input number in
/// the node.
struct Unit::Param {
  std::string name;
  WeakFace face;
  const c10::TensorImpl* face_id = nullptr;
  bool trainable = false;
  size_t bundle = 0;
  size_t index = 0; // in the bundle's layout
  at::Tensor leaf; // shared by all where there is one leaf
  /// The leaf's own, while Unit keeps them from the engine.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> held_hooks;

  /// The module may have dropped it.
  at::Tensor lock() const {
    auto impl = face.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
};

/// While faces show the full parameters to the user.
struct Unit::Summoning {
  NodePtr node; // no face owns it meanwhile
  SummonOptions options;
  UnitState before = UnitState::Sharded;
  bool shown = false; // on this rank
  std::vector<at::Tensor> full; // by bundle: a copy, or the shard
  std::vector<uint32_t> versions; // of the faces, by position
};

/// Keeps a unit alive from the autograd metadata of a face that has no gradient
/// edge to do so: a frozen or summoned one. Registering a hook clears this, but
/// is refused for the one, and the guard keeps the unit of the other.
struct KeepAlive : torch::autograd::FunctionPreHook {
  explicit KeepAlive(std::shared_ptr<Unit> owned) : unit(std::move(owned)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    return gradients;
  }
  std::shared_ptr<Unit> unit;
};

inline torch::autograd::AutogradMeta& meta_of(const at::Tensor& face) {
  return *torch::autograd::impl::materialize_autograd_meta(face);
}

} // namespace tessera::engine
