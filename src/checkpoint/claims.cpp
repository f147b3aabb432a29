#include "checkpoint/claims.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/byte_stream.h"

namespace tessera::checkpoint {
namespace {

void pack_box(ByteWriter& wire, const ShardedTensor::Box& box) {
  wire.numbers(box.offsets);
  wire.numbers(box.sizes);
}

ShardedTensor::Box unpack_box(ByteReader& wire) {
  ShardedTensor::Box box;
  box.offsets = wire.numbers();
  box.sizes = wire.numbers();
  return box;
}

void pack_keys(
    ByteWriter& wire,
    const std::vector<format::DcpPath::Key>& keys) {
  wire.number(keys.size());
  for (const auto& key : keys) {
    const auto* position = std::get_if<int64_t>(&key);
    wire.number(position != nullptr ? 1 : 0);
    if (position != nullptr) {
      wire.number(static_cast<uint64_t>(*position));
    } else {
      wire.text(std::get<std::string>(key));
    }
  }
}

std::vector<format::DcpPath::Key> unpack_keys(ByteReader& wire) {
  std::vector<format::DcpPath::Key> keys(wire.number());
  for (auto& key : keys) {
    if (wire.number() == 1) {
      key = static_cast<int64_t>(wire.number());
    } else {
      key = wire.text();
    }
  }
  return keys;
}

void pack_head(ByteWriter& wire, const Claim& claim) {
  wire.text(claim.name);
  pack_keys(wire, claim.keys);
  wire.number(static_cast<uint64_t>(claim.kind));
  wire.number(claim.value_sum);
  wire.number(claim.value_bytes);
  wire.number(static_cast<uint64_t>(claim.dtype));
  wire.numbers(claim.sizes);
  wire.number(claim.is_of_any_rank ? 1 : 0);
  wire.number(claim.is_on_host ? 1 : 0);
}

Claim unpack_head(ByteReader& wire) {
  Claim claim;
  claim.name = wire.text();
  claim.keys = unpack_keys(wire);
  claim.kind = static_cast<ClaimKind>(wire.number());
  claim.value_sum = wire.number();
  claim.value_bytes = wire.number();
  claim.dtype = static_cast<format::DType>(wire.number());
  claim.sizes = wire.numbers();
  claim.is_of_any_rank = wire.number() == 1;
  claim.is_on_host = wire.number() == 1;
  return claim;
}

void pack_boxes(
    ByteWriter& wire,
    size_t position,
    const std::vector<ShardedTensor::Box>& boxes) {
  wire.number(position);
  wire.number(boxes.size());
  for (const ShardedTensor::Box& box : boxes) {
    pack_box(wire, box);
  }
}

/// Claims that follow one another, each with its position.
class PlacedClaims {
 public:
  explicit PlacedClaims(std::span<const uint8_t> bytes) : wire_(bytes) {
    next();
  }
  bool is_at(size_t position) const {
    return position_ == position;
  }
  std::vector<ShardedTensor::Box> take_boxes() {
    auto boxes = read_boxes();
    next();
    return boxes;
  }
  /// The next claim of a list that was packed with its heads.
  Claim take_claim() {
    auto boxes = read_boxes();
    Claim claim = unpack_head(wire_);
    claim.boxes = std::move(boxes);
    next();
    return claim;
  }

 private:
  std::vector<ShardedTensor::Box> read_boxes() {
    std::vector<ShardedTensor::Box> boxes(wire_.count(1));
    for (ShardedTensor::Box& box : boxes) {
      box = unpack_box(wire_);
    }
    return boxes;
  }
  void next() {
    position_.reset();
    if (wire_.left() > 0) {
      position_ = wire_.number();
    }
  }

  ByteReader wire_;
  std::optional<size_t> position_;
};

} // namespace

PackedClaims pack(const std::vector<Claim>& claims) {
  ByteWriter heads;
  ByteWriter boxes;
  ByteWriter others;
  size_t num_sharded = 0;
  for (size_t position = 0; position < claims.size(); ++position) {
    const Claim& claim = claims[position];
    if (claim.kind != ClaimKind::Sharded) {
      pack_boxes(others, position, claim.boxes);
      pack_head(others, claim);
      continue;
    }
    pack_head(heads, claim);
    if (!claim.boxes.empty()) {
      pack_boxes(boxes, num_sharded, claim.boxes);
    }
    ++num_sharded;
  }
  return {heads.take(), boxes.take(), others.take()};
}

std::vector<Claim> unpack_heads(std::span<const uint8_t> heads) {
  ByteReader wire(heads);
  std::vector<Claim> claims;
  while (wire.left() > 0) {
    claims.push_back(unpack_head(wire));
  }
  return claims;
}

std::vector<Claim> unpack_claims(
    const std::vector<Claim>& heads,
    std::span<const uint8_t> boxes,
    std::span<const uint8_t> others,
    bool all) {
  std::vector<Claim> claims;
  PlacedClaims sharded(boxes);
  PlacedClaims other(others);
  size_t position = 0;
  const auto take_others = [&] {
    for (; other.is_at(position); ++position) {
      claims.push_back(other.take_claim());
    }
  };
  for (size_t i = 0; i < heads.size(); ++i, ++position) {
    take_others();
    const bool has_boxes = sharded.is_at(i);
    if (has_boxes || all) {
      claims.push_back(heads[i]);
    }
    if (has_boxes) {
      claims.back().boxes = sharded.take_boxes();
    }
  }
  take_others();
  return claims;
}

Bytes pack(const RankResult& result) {
  ByteWriter wire;
  wire.number(result.units.size());
  for (const Written& unit : result.units) {
    wire.number(unit.file);
    wire.number(unit.offset);
    wire.number(unit.length);
  }
  wire.number(result.digests.size());
  for (const uint64_t digest : result.digests) {
    wire.number(digest);
  }
  wire.number(result.files.size());
  for (const FileSums& file : result.files) {
    wire.number(file.bytes);
    wire.number(file.blocks.size());
    for (const uint64_t sum : file.blocks) {
      wire.number(sum);
    }
  }
  return wire.take();
}

RankResult unpack_result(std::span<const uint8_t> bytes) {
  ByteReader wire(bytes);
  RankResult result;
  result.units.resize(wire.number());
  for (Written& unit : result.units) {
    unit.file = static_cast<uint32_t>(wire.number());
    unit.offset = wire.number();
    unit.length = wire.number();
  }
  result.digests.resize(wire.number());
  for (uint64_t& digest : result.digests) {
    digest = wire.number();
  }
  result.files.resize(wire.number());
  for (FileSums& file : result.files) {
    file.bytes = wire.number();
    file.blocks.resize(wire.number());
    for (uint64_t& sum : file.blocks) {
      sum = wire.number();
    }
  }
  return result;
}

std::string data_file_name(int rank, size_t file) {
  return fmt::format("__{}_{}.distcp", rank, file);
}

} // namespace tessera::checkpoint
