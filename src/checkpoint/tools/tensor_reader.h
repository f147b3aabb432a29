// Any part of a stored tensor, whatever its boxes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/store/source.h"

namespace tessera::checkpoint {

/// A box of a tensor.
struct Region {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  static Region whole(const StoredTensor& tensor);
};

/// No more than this is held of a tensor.
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

/// Gives the elements of a tensor's region row by row, in pieces of at most
/// kPieceBytes. For one thread. The source and the tensor must outlive it.
class TensorReader {
 public:
  TensorReader(const Source& source, const StoredTensor& tensor);

  /// `take` gets each piece once, in order, and the part of the tensor that it
  /// is; the bytes are gone afterwards. Throws FileError, DamageError.
  using Take = std::function<void(format::ByteSpan, const Region&)>;
  void each_piece(const Region& region, const Take& take);

  /// All of a region; they are there until the next call.
  format::ByteSpan read(const Region& region);

 private:
  void split(const Region& region, const Take& take);
  const Place& place_of(size_t box);

  const Source& source_;
  const StoredTensor& tensor_;
  BlockReader blocks_;
  std::vector<std::optional<Place>> places_; // by box, once it is needed
  std::vector<uint8_t> piece_;
};

} // namespace tessera::checkpoint
