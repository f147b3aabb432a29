#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/format/error.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/utf8.h"

namespace tessera::format {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataName = "__metadata__";

// header, tensor, list of numbers
constexpr int kHeaderDepth = 3;

std::string_view header_text(ByteSpan bytes) {
  if (bytes.size() < kLengthBytes) {
    throw FormatError(
        bytes.size(), "the file ends inside the length of its header");
  }
  const auto length = load_le<uint64_t>(bytes, 0);
  if (length > kMaxHeaderBytes || length > bytes.size() - kLengthBytes) {
    throw FormatError(
        0,
        "a header of " + std::to_string(length) + " bytes, in a file of " +
            std::to_string(bytes.size()));
  }
  const auto text = as_text(bytes.subspan(kLengthBytes, length));
  if (!text.starts_with('{')) {
    throw FormatError(kLengthBytes, "the header does not begin with {");
  }
  return text;
}

const Json& field(
    const Json& tensor,
    const char* name,
    const std::string& where) {
  const auto found = tensor.find(name);
  if (found == tensor.end()) {
    throw FormatError(where + " has no " + name);
  }
  return *found;
}

std::vector<int64_t> numbers(
    const Json& list,
    const std::string& where,
    const char* name) {
  std::vector<int64_t> values;
  if (list.is_array()) {
    values.reserve(list.size());
    for (const auto& item : list) {
      if (!item.is_number_unsigned() || item.get<uint64_t>() > INT64_MAX) {
        break;
      }
      values.push_back(item.get<int64_t>());
    }
  }
  if (!list.is_array() || values.size() != list.size()) {
    throw FormatError(where + ": " + name + " is no list of sizes");
  }
  return values;
}

SafeTensor read_tensor(const std::string& name, const Json& json) {
  const std::string where = "tensor " + in_quotes(name);
  if (!json.is_object() || json.size() != 3) {
    throw FormatError(where + " is not described by three fields");
  }
  const auto& dtype_name = field(json, "dtype", where);
  const auto dtype = dtype_name.is_string()
      ? dtype_of_safetensors_name(dtype_name.get_ref<const std::string&>())
      : std::nullopt;
  if (!dtype) {
    throw FormatError(where + " is of dtype " + in_quotes(dtype_name.dump()));
  }
  SafeTensor tensor{.name = name, .dtype = *dtype};
  tensor.sizes = numbers(field(json, "shape", where), where, "shape");
  const auto places =
      numbers(field(json, "data_offsets", where), where, "data_offsets");
  if (places.size() != 2 || places[0] > places[1]) {
    throw FormatError(where + ": data_offsets are no range");
  }
  tensor.begin = static_cast<uint64_t>(places[0]);
  tensor.end = static_cast<uint64_t>(places[1]);
  const auto bytes = checked_bytes(tensor.sizes, element_bytes(*dtype));
  if (!bytes || static_cast<uint64_t>(*bytes) != tensor.end - tensor.begin) {
    throw FormatError(
        where + " has " + std::to_string(tensor.end - tensor.begin) +
        " bytes, its shape wants another number");
  }
  return tensor;
}

std::map<std::string, std::string> read_metadata(const Json& json) {
  std::map<std::string, std::string> metadata;
  if (!json.is_object()) {
    throw FormatError("__metadata__ is no object");
  }
  for (const auto& [name, value] : json.items()) {
    if (!value.is_string()) {
      throw FormatError("__metadata__." + in_quotes(name) + " is no string");
    }
    metadata.emplace(name, value.get<std::string>());
  }
  return metadata;
}

void check_cover(const SafetensorsHeader& header, uint64_t data_bytes) {
  uint64_t covered = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != covered) {
      throw FormatError(
          header.data_offset + covered,
          "tensor " + in_quotes(tensor.name) +
              " leaves a hole or overlaps: it begins at " +
              std::to_string(tensor.begin) + ", not at " +
              std::to_string(covered));
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    throw FormatError(
        header.data_offset + std::min(covered, data_bytes),
        "the tensors have " + std::to_string(covered) + " bytes, the file " +
            std::to_string(data_bytes) + ". Was it cut off?");
  }
}

std::string header_json(const SafetensorsHeader& header) {
  // Not nlohmann's default: that one sorts, and readers like tensors in order.
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) {
    json[kMetadataName] = header.metadata;
  }
  for (const auto& tensor : header.tensors) {
    json[tensor.name] = {
        {"dtype", info(tensor.dtype).safetensors_name},
        {"shape", tensor.sizes},
        {"data_offsets", {tensor.begin, tensor.end}}};
  }
  return json.dump();
}

void check_names(const SafetensorsHeader& header) {
  for (const auto& [name, text] : header.metadata) {
    if (!is_utf8(name) || !is_utf8(text)) {
      throw FormatError("metadata " + in_quotes(name) + " is no UTF-8");
    }
  }
  std::vector<std::string_view> names;
  for (const auto& tensor : header.tensors) {
    if (tensor.name == kMetadataName || !is_utf8(tensor.name)) {
      throw FormatError("a tensor cannot be named " + in_quotes(tensor.name));
    }
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw FormatError("tensor " + in_quotes(*twice) + " is there twice");
  }
}

} // namespace

SafetensorsHeader read_safetensors(ByteSpan bytes) {
  const auto text = header_text(bytes);
  const Json json = read_json(text, kLengthBytes, kHeaderDepth);
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + text.size();
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadataName) {
      header.metadata = read_metadata(value);
    } else {
      header.tensors.push_back(read_tensor(name, value));
    }
  }
  std::sort(
      header.tensors.begin(),
      header.tensors.end(),
      [](const auto& a, const auto& b) {
        return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
      });
  check_cover(header, bytes.size() - header.data_offset);
  return header;
}

std::string lay_out_safetensors(SafetensorsHeader* header) {
  check_names(*header);
  std::sort(
      header->tensors.begin(),
      header->tensors.end(),
      [](const auto& a, const auto& b) {
        const auto wide_a = element_bytes(a.dtype);
        const auto wide_b = element_bytes(b.dtype);
        return std::tie(wide_b, a.name) < std::tie(wide_a, b.name);
      });
  uint64_t place = 0;
  for (auto& tensor : header->tensors) {
    if (info(tensor.dtype).safetensors_name.empty()) {
      throw FormatError(
          "tensor " + in_quotes(tensor.name) + ": safetensors has no " +
          std::string(info(tensor.dtype).torch_name));
    }
    const auto bytes = checked_bytes(tensor.sizes, element_bytes(tensor.dtype));
    if (!bytes || place > INT64_MAX - static_cast<uint64_t>(*bytes)) {
      throw FormatError("tensor " + in_quotes(tensor.name) + " is too large");
    }
    tensor.begin = place;
    place += static_cast<uint64_t>(*bytes);
    tensor.end = place;
  }
  std::string text = header_json(*header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw FormatError("a header of more than 100 MB");
  }
  const uint64_t length = text.size();
  header->data_offset = kLengthBytes + length;
  text.insert(0, reinterpret_cast<const char*>(&length), kLengthBytes);
  return text;
}

} // namespace tessera::format
