#include "exported/format/payload_reader.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "exported/format/entry_json.h"
#include "exported/format/json_at.h"
#include "exported/format/meta_reader.h"

namespace tessera::exported {
namespace {

using format::FormatError;
using format::in_quotes;

constexpr int kConfigDepth = 16;

// Throws unless the number is written and not negative.
int64_t written_number(
    const Expression<int64_t>& value,
    const JsonAt& at,
    const char* what) {
  const auto* number = std::get_if<int64_t>(&value.value);
  if (!number || *number < 0) {
    at.fail(
        "has " + std::string(what) + " " +
        (number ? std::to_string(*number)
                : in_quotes(std::get<std::string>(value.value))) +
        "; a tensor that is stored has numbers that are not negative");
  }
  return *number;
}

void check_meta(const JsonAt& at, const TensorMeta& meta) {
  if (meta.layout != Layout::Strided) {
    at.refuse("is not strided; only strided tensors are read");
  }
  for (const auto& size : meta.sizes) {
    written_number(size, at, "the size");
  }
  for (const auto& stride : meta.strides) {
    written_number(stride, at, "the stride");
  }
  written_number(meta.storage_offset, at, "the storage offset");
}

PayloadConfig::Entry read_entry(const JsonAt& at) {
  at.expect_only({"path_name", "is_param", "use_pickle", "tensor_meta"});
  if (at.at("use_pickle").boolean()) {
    at.refuse(
        at.has("tensor_meta")
            ? "is a tensor of a class of its own, which is pickled; pickles of programs are not opened. Export the model with plain tensors"
            : "is an object that is no tensor, which is pickled; pickles of programs are not opened. Export a model that has tensors alone");
  }
  if (!at.has("tensor_meta")) {
    at.fail("has no tensor_meta");
  }
  const JsonAt meta = at.at("tensor_meta");
  PayloadConfig::Entry entry{
      .file = at.at("path_name").string(),
      .meta = read_tensor_meta(meta),
      .is_parameter = at.at("is_param").boolean()};
  check_meta(meta, entry.meta);
  return entry;
}

std::vector<int64_t> numbers(const std::vector<Expression<int64_t>>& values) {
  std::vector<int64_t> all;
  for (const auto& value : values) {
    all.push_back(std::get<int64_t>(value.value));
  }
  return all;
}

// The bytes of storage that the tensor reaches; nothing if they overflow.
std::optional<int64_t> reached_bytes(const TensorMeta& meta) {
  const auto sizes = numbers(meta.sizes);
  const auto strides = numbers(meta.strides);
  const auto bytes =
      format::checked_bytes(sizes, format::element_bytes(meta.dtype));
  if (!bytes) {
    return std::nullopt;
  }
  if (*bytes == 0) {
    return 0;
  }
  int64_t end = 1; // behind the last element
  bool overflows = __builtin_add_overflow(
      end, std::get<int64_t>(meta.storage_offset.value), &end);
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    int64_t step = 0;
    overflows |= __builtin_mul_overflow(sizes[dim] - 1, strides[dim], &step);
    overflows |= __builtin_add_overflow(end, step, &end);
  }
  overflows |=
      __builtin_mul_overflow(end, format::element_bytes(meta.dtype), &end);
  return overflows ? std::nullopt : std::optional<int64_t>(end);
}

} // namespace

PayloadConfig read_payload_config(
    std::string_view json,
    std::string_view entry) {
  const auto parsed = read_entry_json(json, entry, kConfigDepth);
  const JsonAt root(parsed, entry);
  root.expect_only({"config"});
  PayloadConfig config;
  root.at("config").for_each_field(
      [&](const std::string& path, const JsonAt& value) {
        config.entries.emplace(path, read_entry(value));
      });
  return config;
}

Payload place_payload(
    const PayloadConfig::Entry& entry,
    const format::ZipEntry& stored,
    const std::string& what) {
  const auto reached = reached_bytes(entry.meta);
  if (!reached) {
    throw FormatError(
        what +
        " has sizes and strides whose product does not fit into 64 bits");
  }
  const bool is_missing = *reached > 0 && stored.size == 0;
  if (!is_missing && static_cast<uint64_t>(*reached) > stored.size) {
    throw FormatError(
        what + " reaches to byte " + std::to_string(*reached) + " of " +
        in_quotes(entry.file) + ", which has " + std::to_string(stored.size));
  }
  return {
      .offset = stored.offset,
      .size = stored.size,
      .checksum = stored.checksum,
      .meta = entry.meta,
      .is_parameter = entry.is_parameter,
      .is_missing = is_missing};
}

} // namespace tessera::exported
