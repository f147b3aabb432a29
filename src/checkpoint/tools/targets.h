// Writing content in each format, a piece at a time. All of them throw
// FileError; what they write appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress_meter.h"
#include "checkpoint/tools/tensor_reader.h"

namespace tessera::checkpoint {

struct TargetOptions {
  bool overwrite = false;
  /// safetensors in a folder: a file has no more than this, unless one tensor
  /// has.
  uint64_t max_shard_bytes = 5'000'000'000;
  bool drop_values = false; // safetensors: leave out what is no tensor
};

/// A folder as `world` ranks would save it: rows of dim 0 divided evenly.
void write_dcp(
    const Content& content,
    const fs::path& folder,
    int world,
    const TargetOptions& options,
    ProgressMeter& progress);
/// A file if `path` ends with ".safetensors", else a folder.
void write_safetensors(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress);
/// A nested dictionary for torch.load(weights_only=True).
void write_torch_file(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress);

/// The bytes of content's tensors, in the dtypes of their entries. All of it
/// must outlive the reader.
class EntryReader {
 public:
  EntryReader(const Content& content, ProgressMeter& progress);

  /// Piece by piece, in order; each is gone when the next one comes.
  void each_piece(
      const TensorEntry& entry,
      const Box& region,
      const std::function<void(format::ByteSpan)>& take);

 private:
  TensorReader tensors_;
  ProgressMeter& progress_;
  std::vector<uint8_t> converted_;
};

/// Throws FileError, with its name, for a value that holds tensors itself (in a
/// tuple, say): those are not copied.
format::Value plain_value(const Content& content, const ValueEntry& entry);

} // namespace tessera::checkpoint
