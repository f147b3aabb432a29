// Any part of a stored tensor, whatever its boxes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/bytes.h"

namespace tessera::checkpoint {

/// No more than this is held of a tensor.
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

/// Gives the elements of tensors row by row, in pieces of at most kPieceBytes.
/// Keeps its memory from tensor to tensor: fresh pages cost more than copying
/// into old ones. For one thread. The source must outlive it.
class TensorReader {
 public:
  explicit TensorReader(const Source& source);

  /// `take` gets each piece once, in order, and the part of the tensor that it
  /// is; the bytes are gone afterwards. Throws FileError, DamageError.
  using Take = std::function<void(format::ByteSpan, const Box&)>;
  void each_piece(
      const StoredTensor& tensor,
      const Box& region,
      const Take& take);

  /// All of a region; they are there until the next call.
  format::ByteSpan read(const StoredTensor& tensor, const Box& region);

 private:
  void split(const Box& region, const Take& take);
  format::ByteSpan read_part(const Box& region);
  void turn_to(const StoredTensor& tensor);
  const Place& place_of(size_t box);

  const Source& source_;
  BlockReader blocks_;
  const StoredTensor* tensor_ = nullptr; // the last one
  std::vector<std::optional<Place>> places_; // of its boxes, once needed
  std::vector<uint8_t> piece_;
};

} // namespace tessera::checkpoint
