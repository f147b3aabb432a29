// Who writes what: what each rank has, and what rank 0 makes of it.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "checkpoint/disk/checksums.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

enum class ClaimKind : uint8_t { kValue, kWhole, kSharded };

/// What a rank has under a name. Its units, the boxes of a tensor or the one
/// value, are what a rank writes or leaves to another.
struct Claim {
  std::string name;
  std::vector<format::DcpPath::Key> keys;
  ClaimKind kind = ClaimKind::kValue;
  uint64_t value_sum = 0; // of a value's pickle
  uint64_t value_bytes = 0;
  format::DType dtype = format::DType::kFloat32;
  std::vector<int64_t> sizes;
  std::vector<Box> boxes;
  bool is_of_any_rank = false; // see StateValue::of_any_rank()
  bool is_on_host = true; // where its values are

  size_t num_units() const {
    return kind == ClaimKind::kValue ? 1 : boxes.size();
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
  /// Several ranks have it, so it must be the same everywhere.
  bool compares = false;
  /// Where some have it on a device and some on the host, digests are made on
  /// the host.
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
  /// `claims` by rank. Throws DisagreementError for what does not fit together:
  /// dtypes, shapes and kinds that differ, plain values that differ, boxes that
  /// overlap in part or leave a gap.
  explicit SavePlan(const std::vector<std::vector<Claim>>& claims);

  /// For each rank and each of its units in order. Each unit is written by
  /// exactly one rank; those that several have go to the one with the fewest
  /// bytes so far, or to the first if that of any will do.
  const std::vector<std::vector<Duty>>& duties() const {
    return duties_;
  }
  uint64_t total_bytes() const {
    return total_bytes_;
  }

  /// Throws DisagreementError for tensors that several ranks have with
  /// different values.
  void check_copies(const std::vector<RankResult>& results) const;

  /// What the folder has when all ranks are done.
  format::DcpMetadata metadata(const std::vector<RankResult>& results) const;

 private:
  struct Holder {
    int rank;
    size_t unit; // of that rank
  };
  struct Unit {
    Box box; // of tensors
    uint64_t bytes = 0;
    std::vector<Holder> holders; // by rank; the first that is left writes it
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
