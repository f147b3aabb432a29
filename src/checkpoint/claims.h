// What ranks tell each other in a save: what each has, and what it has written.
#pragma once

#include <tessera/engine/sharded_tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

/// Claims as ranks send them, in parts that are equal on many ranks.
struct PackedClaims {
  Bytes heads; // of sharded tensors: the same on all ranks of a sharded model
  Bytes boxes; // of sharded tensors, of which this rank has some
  Bytes others; // whole tensors and values, and where among the claims they are
};
PackedClaims pack(const std::vector<Claim>& claims);

/// Claims without boxes.
std::vector<Claim> unpack_heads(std::span<const uint8_t> heads);
/// The claims of a rank, in their order. Those of sharded tensors without boxes
/// are left out, unless `all` are wanted.
std::vector<Claim> unpack_claims(
    const std::vector<Claim>& heads,
    std::span<const uint8_t> boxes,
    std::span<const uint8_t> others,
    bool all);

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

Bytes pack(const RankResult& result);
RankResult unpack_result(std::span<const uint8_t> bytes);

/// "__3_0.distcp".
std::string data_file_name(int rank, size_t file);

} // namespace tessera::checkpoint
