#include "checkpoint/claims.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

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

} // namespace

Bytes pack(const std::vector<Claim>& claims) {
  ByteWriter wire;
  wire.number(claims.size());
  for (const Claim& claim : claims) {
    wire.text(claim.name);
    pack_keys(wire, claim.keys);
    wire.number(static_cast<uint64_t>(claim.kind));
    wire.number(claim.value_sum);
    wire.number(claim.value_bytes);
    wire.number(static_cast<uint64_t>(claim.dtype));
    wire.numbers(claim.sizes);
    wire.number(claim.boxes.size());
    for (const ShardedTensor::Box& box : claim.boxes) {
      pack_box(wire, box);
    }
    wire.number(claim.is_of_any_rank ? 1 : 0);
    wire.number(claim.is_on_host ? 1 : 0);
  }
  return wire.take();
}

std::vector<Claim> unpack_claims(std::span<const uint8_t> bytes) {
  ByteReader wire(bytes);
  std::vector<Claim> claims(wire.number());
  for (Claim& claim : claims) {
    claim.name = wire.text();
    claim.keys = unpack_keys(wire);
    claim.kind = static_cast<ClaimKind>(wire.number());
    claim.value_sum = wire.number();
    claim.value_bytes = wire.number();
    claim.dtype = static_cast<format::DType>(wire.number());
    claim.sizes = wire.numbers();
    claim.boxes.resize(wire.number());
    for (ShardedTensor::Box& box : claim.boxes) {
      box = unpack_box(wire);
    }
    claim.is_of_any_rank = wire.number() == 1;
    claim.is_on_host = wire.number() == 1;
  }
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
