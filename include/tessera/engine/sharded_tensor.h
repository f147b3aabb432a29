#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/engine/tensor_box.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// A tensor of which each rank of a group has some boxes: one value that model
/// state, optimizer state and checkpoints exchange, whatever the layout.
///
/// Boxes of all ranks together cover the tensor once; a rank may have none.
/// Copies are cheap and share the local tensors.
class TESSERA_API ShardedTensor {
 public:
  /// Where a piece lies in the tensor.
  using Box = TensorBox;
  /// A box with its values.
  struct Piece {
    Box box; // where it lies
    at::Tensor tensor; // of the box's sizes
  };

  /// `local` is the tensor that the pieces are parts of, if there is one; it
  /// tells a rank without pieces whose memory they would be in. Throws if a
  /// piece lies outside `sizes`, or differs from its box or from `dtype`. Not
  /// collective.
  ShardedTensor(
      std::vector<int64_t> sizes,
      at::ScalarType dtype,
      std::vector<Piece> pieces,
      Group group,
      at::Tensor local = {});

  /// The sizes of the whole tensor.
  const std::vector<int64_t>& sizes() const {
    return sizes_;
  }
  /// How many elements the whole tensor has.
  int64_t numel() const;
  /// The dtype of every piece.
  at::ScalarType dtype() const {
    return dtype_;
  }
  /// This rank's pieces; may be empty.
  const std::vector<Piece>& pieces() const {
    return pieces_;
  }
  /// Elements of this rank's pieces.
  int64_t local_numel() const;
  /// The ranks that together have the tensor.
  const Group& group() const {
    return group_;
  }

  /// Call it on every rank, also on one without pieces, before the pieces are
  /// written through their addresses: a sharded model must then gather its
  /// parameters anew. Operators on the pieces do this by themselves. `call` is
  /// the name in errors.
  void before_raw_write(const char* call) const;

  /// The whole tensor on every rank, on the device of this rank's pieces; on a
  /// rank without pieces, on its current device of the same type. Throws on all
  /// ranks unless the boxes cover it exactly. Collective.
  at::Tensor full_tensor() const;

 private:
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_;
  std::vector<Piece> pieces_;
  Group group_;
  at::Tensor local_;
};

} // namespace tessera
