// What torch.save writes; see docs/formats/torch_file.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/format/pickle_value.h"
#include "checkpoint/format/random_bytes.h"

namespace tessera::format {

/// A torch file: a value, and where the storages lie that its tensors view.
/// Every Tensor in `value` lies within its storage, which is in `storages`.
struct TorchFile {
  struct StorageData {
    uint64_t offset = 0; // in the file
    uint64_t bytes = 0;
  };

  Value value;
  std::map<std::string, StorageData, std::less<>> storages; // by key
};

/// Does not read tensors. Throws FormatError.
TorchFile read_torch_file(const RandomBytes& bytes);

} // namespace tessera::format
