// Which rank writes what: the plan that rank 0 makes of all ranks' claims.
#pragma once

#include <tessera/engine/sharded_tensor.h>

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "checkpoint/claims.h"
#include "checkpoint/format/dcp_metadata.h"

namespace tessera::checkpoint {

/// What a rank does with one of its units.
struct Duty {
  bool writes = false;
  /// Several ranks have this unit, so it must be the same on all of them.
  bool compares = false;
  /// If some ranks have it on a device and some on the host, digests are
  /// computed on the host.
  bool compares_on_host = false;

  bool operator==(const Duty&) const = default;
};

/// What rank 0 decides.
class SavePlan {
 public:
  /// Takes `claims` by rank, which must outlive the plan. Throws
  /// DisagreementError if they contradict each other: dtypes, shapes and kinds
  /// that differ, plain values that differ, boxes that overlap in part or leave
  /// a gap.
  explicit SavePlan(const std::vector<const std::vector<Claim>*>& claims);

  /// The duties of each rank, one for each of its units in order. Each unit is
  /// written by exactly one rank; a unit that several ranks have goes to the
  /// rank with the fewest bytes so far, or to the first of them if the values
  /// of any rank are good enough.
  const std::vector<std::vector<Duty>>& duties() const {
    return duties_;
  }
  uint64_t total_bytes() const {
    return total_bytes_;
  }

  /// Throws DisagreementError if ranks have different values of the same
  /// tensor.
  void check_copies(const std::vector<RankResult>& results) const;

  /// The contents of the folder when all ranks are done.
  format::DcpMetadata metadata(const std::vector<RankResult>& results) const;

 private:
  struct Holder {
    int rank;
    size_t unit; // of that rank
  };
  struct Unit {
    ShardedTensor::Box box; // of tensors
    uint64_t bytes = 0;
    std::vector<Holder> holders; // by rank; assign() chooses the writer
    Holder writer{};
  };
  struct Entry {
    const Claim* claim = nullptr; // the first one
    int rank = 0; // whose
    bool is_of_any_rank = false; // says some rank
    bool is_mixed = false; // on the host of some ranks and devices of others
    std::vector<Unit> units;
    std::map<std::vector<int64_t>, size_t> by_offset; // units by their box
  };

  void merge(const Claim& claim, int rank, size_t first_unit);
  void check_cover(const Entry& entry) const;
  void assign(size_t num_ranks);
  Duty& duty_of(const Holder& holder);

  std::vector<Entry> entries_; // in the order they were first seen
  std::map<std::string_view, size_t> by_name_;
  std::vector<std::vector<Duty>> duties_;
  uint64_t total_bytes_ = 0;
};

} // namespace tessera::checkpoint
