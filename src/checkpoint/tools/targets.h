// Writing content in each format, a piece at a time. All of them throw
// FileError; what they write appears complete or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress.h"
#include "checkpoint/tools/tensor_reader.h"

namespace tessera::checkpoint {

struct TargetOptions {
  bool overwrite = false;
  /// safetensors in a folder: the largest size of a file, unless a single
  /// tensor is larger.
  uint64_t max_shard_bytes = 5'000'000'000;
  bool drop_values =
      false; // safetensors: leave out values that are not tensors
};

/// A folder as `world` ranks would save it: rows of dim 0 divided evenly.
void write_dcp(
    const Content& content,
    const fs::path& folder,
    int world,
    const TargetOptions& options,
    Progress& progress);
/// A file if `path` ends with ".safetensors", else a folder.
void write_safetensors(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    Progress& progress);
/// A nested dictionary for torch.load(weights_only=True).
void write_torch_file(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    Progress& progress);

/// Reads the bytes of content's tensors in the dtypes of their entries. The
/// arguments must outlive the reader.
class EntryReader {
 public:
  EntryReader(const Content& content, Progress& progress);

  /// Gives the pieces in order; each is valid until the next one comes.
  void each_piece(
      const TensorEntry& entry,
      const Region& region,
      const std::function<void(format::ByteSpan)>& take);

 private:
  TensorReader tensors_;
  Progress& progress_;
  std::vector<uint8_t> converted_;
};

/// Throws FileError with the value's name if the value itself holds tensors (in
/// a tuple, say), which is not supported.
format::Value plain_value(const Content& content, const ValueEntry& entry);

} // namespace tessera::checkpoint
