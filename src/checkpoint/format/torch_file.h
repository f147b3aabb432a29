// What torch.save writes; see docs/formats/torch_file.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/value.h"

namespace tessera::format {

/// A torch file: a value, and the bytes of the storages its tensors view. Every
/// Tensor in `value` lies within its storage, which is in `storages`.
struct TorchFile {
  struct StorageData {
    uint64_t offset; // in the file
    ByteSpan bytes;
  };

  Value value;
  std::map<std::string, StorageData, std::less<>> storages; // by key
};

/// Copies no tensor: `bytes` (a mapped file, or a part of one) must outlive the
/// result. Throws FormatError.
TorchFile read_torch_file(ByteSpan bytes);

} // namespace tessera::format
