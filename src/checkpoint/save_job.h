// One save, in three parts: agree, write, finish.
#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "base/byte_vector.h"
#include "base/mutex.h"
#include "checkpoint/claim_sets.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/peers.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/saved_pieces.h"

namespace tessera::checkpoint {

class SaveJob {
 public:
  /// Rank 0 decides which rank writes what, and creates the folder. Collective;
  /// throws on all ranks.
  SaveJob(
      const StateDict& state,
      const std::filesystem::path& folder,
      const SaveOptions& options,
      const Peers& peers);

  /// After this call, operators may change the state. Returns how many bytes
  /// were copied to allow it.
  uint64_t detach_from_state();

  /// Writes this rank's files. Never throws: finish() reports errors to all
  /// ranks.
  void write();

  /// Gives the folder its name if all ranks have written their files.
  /// Collective; throws on all ranks.
  void finish(const Peers& peers);

 private:
  void decide(const DistinctTexts& all, bool overwrite);
  void keep(const Bytes& duties);
  void compare(SavedPiece& piece);
  /// Runs on this thread and its streams. Devices compute other digests than
  /// the host.
  void compare_on_devices();
  void write_files();
  void write_file(size_t file, const std::vector<size_t>& pieces);
  void report(uint64_t bytes);
  void commit(const std::vector<Bytes>& results);

  const std::filesystem::path folder_;
  const int rank_;
  const int num_ranks_;
  const int num_files_;
  const Progress progress_;
  std::vector<Claim> claims_;
  std::vector<SavedPiece> pieces_;
  Outcome outcome_; // of write(): a RankResult
  uint64_t total_bytes_ = 0;

  // Used on rank 0 only.
  ClaimSets all_claims_;
  std::unique_ptr<SavePlan> plan_;
  std::unique_ptr<FolderWriter> writer_;
  // Used on every rank.
  std::filesystem::path partial_;
  RankResult result_;
  Mutex progress_mutex_;
  uint64_t done_bytes_ TESSERA_GUARDED_BY(progress_mutex_) = 0;
};

} // namespace tessera::checkpoint
