// Reads any part of a stored tensor, whatever its boxes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/bytes.h"

namespace tessera::checkpoint {

/// At most this many bytes of a tensor are held.
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

/// Gives the elements of tensors row by row, in pieces of at most kPieceBytes.
/// Keeps its memory from tensor to tensor: fresh pages cost more than copying
/// into old ones. For use by one thread. The source must outlive the reader.
class TensorReader {
 public:
  explicit TensorReader(const Source& source);

  /// `take` gets each piece once, in order, and the part of the tensor that it
  /// holds; the bytes are valid during the call only. Throws FileError,
  /// DamageError.
  using Take = std::function<void(format::ByteSpan, const TensorBox&)>;
  void each_piece(
      const StoredTensor& tensor,
      const TensorBox& region,
      const Take& take);

  /// All bytes of a region, valid until the next call.
  format::ByteSpan read(const StoredTensor& tensor, const TensorBox& region);

 private:
  void split(const TensorBox& region, const Take& take);
  format::ByteSpan read_part(const TensorBox& region);
  void turn_to(const StoredTensor& tensor);
  const Place& place_of(size_t box);

  const Source& source_;
  BlockReader blocks_;
  const StoredTensor* tensor_ = nullptr; // the last one
  std::vector<std::optional<Place>> places_; // of its boxes, once needed
  std::vector<uint8_t> piece_;
};

} // namespace tessera::checkpoint
