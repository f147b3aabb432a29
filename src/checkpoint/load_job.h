// One load on one rank: what goes where, then the reading.
#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <cstdint>
#include <functional>

#include "base/mutex.h"
#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/target_match.h"

namespace tessera::checkpoint {

class LoadJob {
 public:
  /// Compares the target with the checkpoint. Throws c10::ValueError that lists
  /// everything that does not fit.
  LoadJob(
      const Source& source,
      StateDict& target,
      const LoadOptions& options,
      LeftOutParts left_out,
      int num_threads);

  /// Reads every block that read() will read, and keeps none of them. Throws
  /// FileError.
  void verify();
  /// Fills the tensors. If it throws FileError, some of them have been filled.
  void read();
  /// Replaces the values that are not tensors; once.
  void replace_values();

  LoadReport report() const {
    return matched_.report;
  }

 private:
  void in_threads(
      const std::function<void(const PlannedRead& read, BlockReader& reader)>&
          body);
  void fill(const PlannedRead& read, BlockReader& reader);

  const Source& source_;
  const int num_threads_;
  const bool verifies_;
  const Progress progress_;
  MatchedTarget matched_;

  Mutex progress_mutex_;
  uint64_t done_bytes_ TESSERA_GUARDED_BY(progress_mutex_) = 0;
};

} // namespace tessera::checkpoint
