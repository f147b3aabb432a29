#include "checkpoint/tools/entry_reader.h"

#include "checkpoint/tools/cast.h"

namespace tessera::checkpoint {

EntryReader::EntryReader(const Content& content, ProgressMeter& progress)
    : tensors_(*content.source), progress_(progress) {}

void EntryReader::each_piece(
    const TensorEntry& entry,
    const TensorBox& region,
    const std::function<void(format::ByteSpan)>& take) {
  const auto from = entry.tensor->dtype;
  tensors_.each_piece(
      *entry.tensor, region, [&](format::ByteSpan piece, const TensorBox&) {
        if (entry.dtype != from) {
          piece = cast(piece, from, entry.dtype, converted_);
        }
        take(piece);
        progress_.add(piece.size());
      });
}

} // namespace tessera::checkpoint
