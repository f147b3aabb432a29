// Which rank writes what: the claims of each rank, and the plan that rank 0
// makes of them.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "base/byte_vector.h"
#include "checkpoint/disk/checksums.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

enum class ClaimKind : uint8_t { Value, Whole, Sharded };

/// What a rank has under a name. It consists of units, the boxes of a tensor or
/// the one value: each unit is written by this rank or left to another.
struct Claim {
  std::string name;
  std::vector<format::DcpPath::Key> keys;
  ClaimKind kind = ClaimKind::Value;
  uint64_t value_sum = 0; // of a value's pickle
  uint64_t value_bytes = 0;
  format::DType dtype = format::DType::Float32;
  std::vector<int64_t> sizes;
  std::vector<ShardedTensor::Box> boxes;
  bool is_of_any_rank = false; // see StateValue::of_any_rank()
  bool is_on_host = true; // where its values are

  size_t num_units() const {
    return kind == ClaimKind::Value ? 1 : boxes.size();
  }
};

Bytes pack(const std::vector<Claim>& claims);
std::vector<Claim> unpack_claims(std::span<const uint8_t> bytes);

/// Where a rank has written a unit.
struct Written {
  uint32_t file = 0; // N of __RANK_N.distcp
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct RankResult {
  std::vector<Written> units; // those it had to write, in their order
  std::vector<uint64_t> digests; // of those it had to compare, in their order
  std::vector<FileSums> files;
};

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

Bytes pack(const RankResult& result);
RankResult unpack_result(std::span<const uint8_t> bytes);

/// "__3_0.distcp".
std::string data_file_name(int rank, size_t file);

/// What rank 0 decides.
class SavePlan {
 public:
  /// Takes `claims` by rank. Throws DisagreementError if they contradict each
  /// other: dtypes, shapes and kinds that differ, plain values that differ,
  /// boxes that overlap in part or leave a gap.
  explicit SavePlan(const std::vector<std::vector<Claim>>& claims);

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
