#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/tools/progress_meter.h"

namespace tessera::checkpoint {

struct VerifyReport {
  std::string format; // empty if unknown
  size_t num_files = 0;
  size_t num_tensors = 0;
  size_t num_values = 0;
  uint64_t bytes_read = 0;
  bool has_checksums = false;
  /// One text per damaged place: which file, which bytes, what lies there.
  std::vector<std::string> damages;
  /// One text per part that is not supported but shows no damage.
  std::vector<std::string> unsupported;

  bool is_sound() const {
    return damages.empty() && unsupported.empty();
  }
};

/// Reads all of a checkpoint and compares it with its checksums, if it has any,
/// and its parts with each other. What is damaged or not supported is reported,
/// not thrown; FileError is thrown only if the path does not exist. Names that
/// begin with one of `exclude`, up to a dot, are not parsed, and damage is not
/// reported if nothing else lies there.
VerifyReport verify(
    const fs::path& path,
    const std::vector<std::string>& exclude,
    ProgressMeter& progress);

/// As JSON.
std::string verify_json(const VerifyReport& report);

} // namespace tessera::checkpoint
