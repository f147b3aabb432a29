// The formats behind Source::open(). All of them throw FileError.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

constexpr const char* kDcpMetadataName = ".metadata";
constexpr const char* kSafetensorsIndexName = "model.safetensors.index.json";

/// The path that Source::open() was given, and the file or folder it leads to.
struct OpenedPath {
  fs::path path; // as it was given
  fs::path root; // resolved
  std::string name; // of the file in `root`; empty: the folder itself
  Sums sums = Sums::Compare;
};

/// The .checksums of a folder; nothing if the folder has none. Throws
/// DamageError if it is damaged.
std::optional<Checksums> read_side_file(const fs::path& root);

std::unique_ptr<Source> open_dcp(const OpenedPath& at);
std::unique_ptr<Source> open_safetensors_file(const OpenedPath& at);
std::unique_ptr<Source> open_safetensors_index(const OpenedPath& at);
std::unique_ptr<Source> open_torch_file(const OpenedPath& at);
std::unique_ptr<Source> open_exported(const OpenedPath& at);

} // namespace tessera::checkpoint
