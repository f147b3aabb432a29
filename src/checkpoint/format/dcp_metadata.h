// The .metadata of a DCP folder; see docs/formats/dcp.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

/// Where an item lies: a torch file, `length` bytes from `offset`.
struct DcpStorage {
  std::string file; // relative to the folder, and below it
  int64_t offset = 0;
  int64_t length = 0;
  std::vector<std::string> transforms; // compression and the like

  bool operator==(const DcpStorage&) const = default;
};

/// A box of a tensor.
struct DcpChunk {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  /// Missing only if the box has no elements.
  std::optional<DcpStorage> storage;

  bool operator==(const DcpChunk&) const = default;
};

struct DcpTensor {
  std::string name;
  DType dtype = DType::Float32;
  std::vector<int64_t> sizes;
  std::vector<DcpChunk> chunks;
  bool requires_grad = false;
  bool pin_memory = false;
  MemoryFormat memory_format = MemoryFormat::Contiguous;

  bool operator==(const DcpTensor&) const = default;
};

/// Any value that is not a tensor.
struct DcpBytes {
  std::string name;
  DcpStorage storage;

  bool operator==(const DcpBytes&) const = default;
};

/// The keys that a name stands for: names are keys joined by dots.
struct DcpPath {
  using Key = std::variant<std::string, int64_t>; // int: position in a list

  std::string name;
  std::vector<Key> keys;

  bool operator==(const DcpPath&) const = default;
};

struct DcpStorageMeta {
  std::optional<std::string> checkpoint_id;
  std::optional<std::string> save_id;
  std::optional<std::string> load_id;
  std::vector<std::string> modules;

  bool operator==(const DcpStorageMeta&) const = default;
};

struct DcpMetadata {
  std::vector<DcpTensor> tensors;
  std::vector<DcpBytes> bytes;
  /// Empty if the dictionary was saved flat.
  std::optional<std::vector<DcpPath>> paths;
  std::optional<DcpStorageMeta> storage_meta;
  std::optional<std::string> version;

  bool operator==(const DcpMetadata&) const = default;
};

/// Reads the metadata of torch 2.0 to 2.13. Makes sure that every box lies in
/// its tensor and every file in the folder. Throws FormatError.
DcpMetadata read_dcp_metadata(ByteSpan bytes);

/// Writes metadata for torch.distributed.checkpoint of 2.13. Does not check for
/// what read_dcp_metadata() would refuse.
std::string write_dcp_metadata(const DcpMetadata& metadata);

} // namespace tessera::format
