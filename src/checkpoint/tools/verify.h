#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/tools/progress_meter.h"

namespace tessera::checkpoint {

struct VerifyReport {
  std::string format; // empty if it could not be found out
  size_t num_files = 0;
  size_t num_tensors = 0;
  size_t num_values = 0;
  uint64_t bytes_read = 0;
  bool has_checksums = false;
  /// One text for each: which file, which bytes, what lies there.
  std::vector<std::string> damages;
  /// One text for each part that cannot be read here, and shows no damage.
  std::vector<std::string> unsupported;

  bool is_sound() const {
    return damages.empty() && unsupported.empty();
  }
};

/// Reads all of a checkpoint and compares it with its checksums, where it has
/// some, and its parts with each other. What is damaged or not supported is
/// reported, not thrown; FileError is only for a path that is not there. What
/// begins with one of `exclude`, at a dot, is not parsed, and damage where
/// nothing else lies is not reported.
VerifyReport verify(
    const fs::path& path,
    const std::vector<std::string>& exclude,
    ProgressMeter& progress);

/// As JSON.
std::string verify_json(const VerifyReport& report);

} // namespace tessera::checkpoint
