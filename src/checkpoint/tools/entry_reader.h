// The bytes of content's tensors, a piece at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress_meter.h"
#include "checkpoint/tools/tensor_reader.h"

namespace tessera::checkpoint {

/// Reads tensors in the dtypes of their entries. Content and progress must
/// outlive the reader.
class EntryReader {
 public:
  EntryReader(const Content& content, ProgressMeter& progress);

  /// Piece by piece, in order; each is gone when the next one comes.
  void each_piece(
      const TensorEntry& entry,
      const TensorBox& region,
      const std::function<void(format::ByteSpan)>& take);

 private:
  TensorReader tensors_;
  ProgressMeter& progress_;
  std::vector<uint8_t> converted_;
};

} // namespace tessera::checkpoint
