// One save, in three parts: agree, write, finish.
#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/item_file.h"
#include "checkpoint/format/value.h"
#include "checkpoint/peers.h"
#include "checkpoint/save_plan.h"

namespace tessera::checkpoint {

class SaveJob {
 public:
  /// Rank 0 decides who writes what and makes the folder. Collective; throws on
  /// all ranks.
  SaveJob(
      const StateDict& state,
      const std::filesystem::path& folder,
      const SaveOptions& options,
      const Peers& peers);

  /// From here on operators may change the state. Returns how many bytes were
  /// copied for that.
  uint64_t detach_from_state();

  /// Writes this rank's files. Throws nothing: finish() tells everybody.
  void write();

  /// Gives the folder its name if all ranks have written. Collective; throws on
  /// all ranks.
  void finish(const Peers& peers);

 private:
  struct Unit {
    size_t claim;
    at::Tensor data; // of tensors
    format::Value value; // of others
    uint64_t bytes = 0;
    Duty duty = {};
    size_t result = 0; // its place in RankResult::units, if it is written
    std::optional<uint64_t> digest; // of what is compared, once it is made
  };

  void add_units(StateDict& state);
  void add_tensor(Claim claim, const StateValue& value);
  void add_sharded(Claim claim, const ShardedTensor& tensor);
  void decide(
      const std::vector<Bytes>& claims,
      bool overwrite,
      ByteWriter& out);
  void keep(ByteReader duties);
  void compare(Unit& unit);
  /// On this thread and its streams. Digests of devices are not those of the
  /// host.
  void compare_on_devices();
  void write_files();
  void write_file(size_t file, const std::vector<size_t>& units);
  ItemPlace write_unit(ItemFile& file, Unit& unit);
  void report(uint64_t bytes);
  void commit(const std::vector<Bytes>& results);

  const std::filesystem::path folder_;
  const int rank_;
  const int num_ranks_;
  const int num_files_;
  const Progress progress_;
  std::vector<Claim> claims_;
  std::vector<Unit> units_;
  Outcome outcome_; // of write(): a RankResult
  uint64_t total_bytes_ = 0;

  // Of rank 0.
  std::vector<std::vector<Claim>> all_claims_;
  std::unique_ptr<SavePlan> plan_;
  std::unique_ptr<FolderWriter> writer_;
  // Everywhere.
  std::filesystem::path partial_;
  RankResult result_;
  std::mutex progress_mutex_;
  uint64_t done_bytes_ = 0;
};

} // namespace tessera::checkpoint
