#include "checkpoint/disk/checksums.h"

#define XXH_INLINE_ALL
#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/xxh3.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/path.h"

namespace tessera::checkpoint {

namespace {

constexpr size_t kDigits = 16; // of a sum, in hexadecimal

std::string in_hex(uint64_t sum) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text(kDigits, '0');
  for (size_t i = kDigits; i-- > 0; sum >>= 4) {
    text[i] = kHex[sum & 15];
  }
  return text;
}

uint64_t from_hex(std::string_view text, const std::string& where) {
  uint64_t sum = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, sum, 16);
  if (error != std::errc() || stop != end) {
    throw format::FormatError(
        where + ": " + format::in_quotes(text) +
        " is not a checksum of 16 hexadecimal digits");
  }
  return sum;
}

uint64_t blocks_in(uint64_t bytes) {
  return bytes / kBlockBytes + (bytes % kBlockBytes != 0 ? 1 : 0);
}

/// `json[name]`, which must exist. Throws FormatError.
const nlohmann::json& field(
    const nlohmann::json& json,
    const char* name,
    nlohmann::json::value_t type,
    const std::string& where) {
  const auto found = json.is_object() ? json.find(name) : json.end();
  if (!json.is_object() || found == json.end() || found->type() != type) {
    throw format::FormatError(
        where + ": \"" + name + "\" is missing or of the wrong kind");
  }
  return *found;
}

using Type = nlohmann::json::value_t;

FileSums read_file_sums(const nlohmann::json& json, const std::string& name) {
  const std::string where = "file " + format::in_quotes(name);
  FileSums sums;
  sums.bytes =
      field(json, "bytes", Type::number_unsigned, where).get<uint64_t>();
  const auto& text =
      field(json, "blocks", Type::string, where).get_ref<const std::string&>();
  if (text.size() % kDigits != 0 ||
      text.size() / kDigits != blocks_in(sums.bytes)) {
    throw format::FormatError(
        where + ": the number of checksums is not that of its blocks");
  }
  sums.blocks.reserve(text.size() / kDigits);
  for (size_t at = 0; at < text.size(); at += kDigits) {
    sums.blocks.push_back(
        from_hex(std::string_view(text).substr(at, kDigits), where));
  }
  return sums;
}

nlohmann::json without_own_sum(const Checksums& sums) {
  nlohmann::json files = nlohmann::json::object();
  for (const auto& [name, file] : sums.files) {
    std::string blocks;
    blocks.reserve(file.blocks.size() * kDigits);
    for (const uint64_t sum : file.blocks) {
      blocks += in_hex(sum);
    }
    files[name] = {{"bytes", file.bytes}, {"blocks", std::move(blocks)}};
  }
  return {
      {"version", 1},
      {"algorithm", "xxh3-64"},
      {"block_bytes", kBlockBytes},
      {"files", std::move(files)}};
}

} // namespace

struct FileSummer::State {
  XXH3_state_t hash;
  uint64_t in_block = 0;
};

FileSummer::FileSummer() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->hash);
}
FileSummer::~FileSummer() = default;
FileSummer::FileSummer(FileSummer&&) noexcept = default;
FileSummer& FileSummer::operator=(FileSummer&&) noexcept = default;

void FileSummer::add(format::ByteSpan bytes) {
  sums_.bytes += bytes.size();
  while (!bytes.empty()) {
    const uint64_t room = kBlockBytes - state_->in_block;
    const auto part = bytes.first(std::min<uint64_t>(room, bytes.size()));
    bytes = bytes.subspan(part.size());
    if (part.size() == kBlockBytes) { // nothing to carry over
      sums_.blocks.push_back(checksum(part));
      continue;
    }
    XXH3_64bits_update(&state_->hash, part.data(), part.size());
    state_->in_block += part.size();
    if (state_->in_block == kBlockBytes) {
      sums_.blocks.push_back(XXH3_64bits_digest(&state_->hash));
      XXH3_64bits_reset(&state_->hash);
      state_->in_block = 0;
    }
  }
}

FileSums FileSummer::finish() {
  if (state_->in_block > 0) {
    sums_.blocks.push_back(XXH3_64bits_digest(&state_->hash));
  }
  XXH3_64bits_reset(&state_->hash);
  state_->in_block = 0;
  return std::exchange(sums_, {});
}

uint64_t checksum(format::ByteSpan bytes) {
  static const Xxh3 xxh3 = best_xxh3();
  return xxh3(bytes.data(), bytes.size());
}

FileSums sums_of(format::ByteSpan bytes) {
  FileSummer summer;
  summer.add(bytes);
  return summer.finish();
}

std::string write_checksums(const Checksums& sums) {
  nlohmann::json json = without_own_sum(sums);
  const std::string text = json.dump();
  json["own"] = in_hex(checksum(format::as_bytes(text)));
  return json.dump(1) + "\n";
}

Checksums read_checksums(std::string_view text) {
  const nlohmann::json json = format::read_json(text, 0, 4);
  if (field(json, "version", Type::number_unsigned, "the file") != 1 ||
      field(json, "algorithm", Type::string, "the file") != "xxh3-64" ||
      field(json, "block_bytes", Type::number_unsigned, "the file") !=
          kBlockBytes) {
    throw format::FormatError(
        "checksums of a kind that this version does not support");
  }
  Checksums sums;
  for (const auto& [name, file] :
       field(json, "files", Type::object, "the file").items()) {
    if (const auto why = format::why_it_leaves(name); !why.empty()) {
      throw format::FormatError(
          "the path " + format::in_quotes(name) + " " + std::string(why));
    }
    sums.files.emplace(name, read_file_sums(file, name));
  }
  // Writing the parsed checksums must give the same text, so that every bit is
  // covered.
  if (write_checksums(sums) != text) {
    throw format::FormatError("the checksums themselves are damaged");
  }
  return sums;
}

} // namespace tessera::checkpoint
