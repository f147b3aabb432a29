// The parameters of a unit: faces in the module, leaves for optimizers.
#pragma once

#include <tessera/engine/sharded_tensor.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/autograd_compat.h"

namespace tessera::engine {

class Unit;

/// A parameter as the module registered it.
struct NamedParam {
  std::string name; // below the unit's module
  at::Tensor tensor;
};

/// One parameter of a unit.
struct UnitParam {
  using WeakFace =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::string name; // below the unit's module
  WeakFace face;
  const c10::TensorImpl* face_id = nullptr;
  bool trainable = false;
  size_t bundle = 0;
  size_t index = 0; // in the bundle's layout
  at::Tensor leaf; // shared by all where there is one leaf
  /// The leaf's own, while UnitGradients keeps them from the engine.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> held_hooks;

  /// The face; undefined if the module dropped it.
  at::Tensor lock() const {
    auto impl = face.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
};

/// The faces and the leaves of a unit; see [Note: storage identity] for how
/// parameters become faces.
///
/// A shard is an ordinary tensor with a leaf for each parameter that views this
/// rank's part of it (or one leaf for all of it, UnitOptions::one_leaf). Leaves
/// are what optimizers get. They carry the key of faces too, so that writes to
/// them are seen: fused optimizers do not bump version counters.
///
/// Faces own their unit: trainable ones through their gradient edge, frozen
/// ones through a hook of their autograd metadata that never runs. The unit
/// knows its faces only weakly; it dies with the module. A unit without
/// parameters is kept by the units below it.
class UnitParams {
 public:
  explicit UnitParams(Unit& unit);

  /// In which bundle a parameter is, and where in the bundle's layout.
  struct Place {
    size_t bundle = 0;
    size_t index = 0;
  };
  /// The parameter that a leaf holds alone.
  struct LeafParam {
    std::string name; // below the module of the root unit
    std::vector<int64_t> sizes; // of the whole parameter
    std::vector<TensorBox>
        boxes; // this rank's, in the order of the leaf's elements
  };

  /// Declares a parameter, see shard().
  void add(const NamedParam& param, Place place);
  /// Turns the declared parameters into faces with leaves. The unit's bundles
  /// are there.
  void shard(const std::vector<NamedParam>& params);

  /// By position, which is the input number in the node.
  std::vector<UnitParam>& all() {
    return params_;
  }
  const std::vector<UnitParam>& all() const {
    return params_;
  }
  /// What the parameter's face shows outside of summoning.
  at::Tensor face_alias(const UnitParam& param) const;
  /// The node behind the faces; null if all of them are frozen or summoned.
  libtorch::NodePtr find_node() const {
    return node_.lock();
  }

  /// The leaf of the parameter whose face has this TensorImpl. With one leaf
  /// for all, that.
  at::Tensor leaf_of(const c10::TensorImpl* face) const;
  /// All leaves, in the order of the parameters, for life.
  std::vector<at::Tensor> leaves() const;
  Place place_of(const c10::TensorImpl* face) const;
  /// Nothing for a tensor that is no leaf of the unit, and for the one leaf of
  /// all parameters.
  std::optional<LeafParam> find_leaf(const c10::TensorImpl* leaf) const;
  /// This rank's part of that parameter, with its place. Shares the leaf's
  /// memory.
  ShardedTensor sharded(const c10::TensorImpl* face) const;

  /// Freezes or thaws a parameter: its gradient edge, its leaf, a stale
  /// gradient.
  void set_requires_grad(const c10::TensorImpl* face, bool on);
  void set_trainable(UnitParam& param, bool on);
  /// Freezes and thaws what a user froze or thawed through a face or a leaf.
  void follow_requires_grad();
  /// Throws if something replaced the data of a face behind the unit's back.
  void check_faces(const char* call) const;
  /// Backward runs the unit's node and its leaves' accumulators on the stream
  /// that is current now.
  void run_backward_on_current_stream();
  /// The values changed: a graph of the old ones must not run backward with the
  /// new ones.
  void bump_versions();

 private:
  void make_leaves();
  void make_faces(const std::vector<NamedParam>& params);
  libtorch::NodePtr node();
  void refuse_partial_freeze(const UnitParam& param) const;

  Unit& unit_;
  std::vector<UnitParam> params_;
  libtorch::WeakNodePtr node_; // owned by the faces' gradient edges
};

/// The unit of a face, or nullptr for a tensor that is no face. Finds the unit
/// of a Summoned face too.
Unit* unit_of(const at::Tensor& tensor);

/// A face or a leaf: what a rank has of it may be a part, all or nothing.
bool is_sharded(const at::Tensor& tensor);

} // namespace tessera::engine
