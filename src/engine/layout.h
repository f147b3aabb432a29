// Computes which elements of a unit's parameters lie on which rank: pure
// arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::engine {

using Shape = std::vector<int64_t>;

/// Elements that follow one another in a parameter and in a rank's shard.
struct Run {
  int64_t param_begin = 0; // in the flattened parameter
  int64_t shard_begin = 0; // in the rank's shard
  int64_t numel = 0; // 0 if this rank has nothing of the parameter
};

/// [Note: layouts]
///
/// The full buffer holds a unit's parameters one after another, each at a
/// fixed offset. A rank's shard is a flat tensor of the same size on all ranks,
/// padded with zeros. Two layouts define how shards and full buffer correspond:
///
///   Flat   the full buffer is cut into equal ranges. The shards, one after
///          another, *are* the full buffer: a gather needs no copy.
///   Dim0   each parameter is cut on dim 0 into chunks of ceil(rows / ranks)
///          rows, and a shard holds this rank's chunk of each. A gather needs a
///          copy-out; in exchange every rank has whole rows.
///
/// In both, a rank's part of a parameter is one Run.
///
/// [Note: more ranks than rows]
///
/// Collectives give every rank a part of the same size. With Dim0 and more
/// ranks than rows, ranks that hold nothing would send padding, and the shards
/// of all ranks together would grow with the number of ranks. So where more
/// than half of what the shards would bring is padding, the shards do not
/// travel. The full buffer itself travels, as a sum: a rank puts its rows
/// among zeros, and the sum over the ranks is the whole. Gradients are averaged
/// whole, and each rank keeps its rows. A sum sends each byte twice, a gather
/// once: so with either way a rank sends and holds at most about twice what
/// there is, whatever the number of ranks.
class Layout {
 public:
  enum class Kind { Flat, Dim0 };
  /// What travels when parameters are gathered and gradients reduced.
  enum class Travel {
    Shards, // Flat: one after another they are the full buffer
    Chunks, // Dim0: shards, whose chunks are copied to their places
    Whole, // Dim0: the full buffer, see [Note: more ranks than rows]
  };

  /// In elements. The defaults suit vector instructions: 64 bytes of float32.
  struct Alignment {
    int64_t param = 16; // where parameters begin
    int64_t shard = 16; // size of a shard, in Flat
  };

  Layout(
      Kind kind,
      std::vector<Shape> shapes,
      int num_ranks,
      Alignment alignment);
  Layout(Kind kind, std::vector<Shape> shapes, int num_ranks);

  Kind kind() const {
    return kind_;
  }
  /// Elements of the full buffer up to the end of the last parameter.
  int64_t unpadded_numel() const {
    return shapes_.empty() ? 0 : full_offsets_.back() + numels_.back();
  }
  int num_ranks() const {
    return num_ranks_;
  }
  size_t num_params() const {
    return shapes_.size();
  }
  const Shape& shape(size_t param) const {
    return shapes_[param];
  }
  int64_t numel(size_t param) const {
    return numels_[param];
  }

  Travel travel() const {
    return travel_;
  }
  /// Elements of the buffer that a gather fills and a reduction starts from:
  /// full_numel() or shard_numel() times ranks.
  int64_t travel_numel() const {
    return travel_ == Travel::Whole ? full_numel_ : shard_numel_ * num_ranks_;
  }

  /// Elements of the full buffer, padding included: shard_numel() times ranks
  /// in Flat. In Dim0 only what aligns parameters is padding.
  int64_t full_numel() const {
    return full_numel_;
  }
  int64_t shard_numel() const {
    return shard_numel_;
  }
  /// Where the parameter begins in the full buffer.
  int64_t full_offset(size_t param) const {
    return full_offsets_[param];
  }

  /// This rank's part of a parameter.
  Run run(size_t param, int rank) const;
  /// The shape of that part as a tensor: flat in Flat, rows in Dim0; the
  /// parameter's own shape if one rank has all of it.
  Shape local_shape(size_t param, int rank) const;

  /// Dim0: how many elements each shard reserves for the parameter, and where.
  int64_t chunk_numel(size_t param) const {
    return chunk_numels_[param];
  }
  int64_t chunk_offset(size_t param) const {
    return chunk_offsets_[param];
  }

 private:
  void lay_out_flat();
  void lay_out_dim0();

  Kind kind_;
  Travel travel_ = Travel::Shards;
  std::vector<Shape> shapes_;
  int num_ranks_;
  Alignment alignment_;
  std::vector<int64_t> numels_;
  std::vector<int64_t> full_offsets_;
  std::vector<int64_t> chunk_numels_; // Dim0
  std::vector<int64_t> chunk_offsets_; // Dim0
  int64_t full_numel_ = 0;
  int64_t shard_numel_ = 0;
};

} // namespace tessera::engine
