// The autograd node that stands behind a unit's faces.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "libtorch/compat.h"

namespace tessera::engine {

class Unit;

/// [Note: gather node]
///
/// Faces are not leaves: they are outputs of one persistent node per unit, as
/// if each forward had computed them from the shard. Autograd hands the node
/// the gradients of all faces at once, when the last of them is there; its
/// sequence number is the highest, so it runs before anything else that is
/// ready. The node gives the gradients to Schedule::take_gradients(): they are
/// copied to one flat buffer per dtype, the full parameters are freed, and the
/// reduce-scatter starts, whose result becomes the leaves' gradients.
///
/// Its next edges lead to the leaves. A plain backward sends nothing there; the
/// edges are for torch::autograd::grad(loss, leaves).
///
/// An optimizer of LibTorch's that is built on faces fails loudly ("can't
/// optimize a non-leaf Tensor"), which is what it should do. One that was built
/// before sharding is refused when it asks for gradients, see
/// [Note: gradients of faces] in face_meta.h.
///
/// It owns its unit, and faces own it: so a unit lives as long as its module,
/// or as a graph that was made with it. Where all parameters are frozen there
/// is no node.
class GatherNode : public torch::autograd::Node {
 public:
  explicit GatherNode(std::shared_ptr<Unit> unit)
      : Node(UINT64_MAX), unit_(std::move(unit)) {}

  /// Where the backward of a unit begins: in schedule_backward.cpp, with what
  /// it calls.
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override;
  std::string name() const override {
    return "TesseraGather";
  }

  Unit& unit() const {
    return *unit_;
  }

#if TESSERA_TORCH_AT_LEAST(2, 13)
  /// The last owner is gone. The unit's weak pointer would keep this object,
  /// and this object the unit.
  void release_resources() override {
    Node::release_resources();
    unit_.reset();
  }
#endif

 private:
  std::shared_ptr<Unit> unit_;
};

} // namespace tessera::engine
