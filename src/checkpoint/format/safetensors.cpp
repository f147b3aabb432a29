#include "checkpoint/format/safetensors.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/utf8.h"

namespace tessera::format {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataName = "__metadata__";

// More dims than a tensor of LibTorch's kernels can have.
constexpr size_t kMostDims = 64;

std::string header_text(const RandomBytes& bytes) {
  if (bytes.size() < kLengthBytes) {
    throw FormatError(
        bytes.size(), "the file ends inside the length of its header");
  }
  const auto length = bytes.get<uint64_t>(0);
  if (length > kMaxHeaderBytes || length > bytes.size() - kLengthBytes) {
    throw FormatError(
        0,
        "a header of " + std::to_string(length) + " bytes, in a file of " +
            std::to_string(bytes.size()));
  }
  if (length == 0 || bytes.get<char>(kLengthBytes) != '{') {
    throw FormatError(kLengthBytes, "the header does not begin with {");
  }
  return bytes.text(kLengthBytes, length);
}

/// Takes the header's JSON piece by piece as it is parsed, and refuses at once
/// what does not belong there: a tree of the whole header would need up to
/// fifty times its bytes.
class HeaderHandler : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderHandler(SafetensorsHeader* header) : header_(*header) {}

  bool null() override {
    return other();
  }
  bool boolean(bool) override {
    return other();
  }
  bool number_integer(number_integer_t) override {
    return other(); // a negative one
  }
  bool number_float(number_float_t, const string_t&) override {
    return other();
  }
  bool binary(binary_t&) override {
    return other();
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::Numbers || number > INT64_MAX) {
      return other();
    }
    if (numbers().size() == kMostDims) {
      refuse(
          field_ + " has more than " + std::to_string(kMostDims) + " numbers");
    }
    numbers().push_back(static_cast<int64_t>(number));
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::Metadata) {
      header_.metadata.emplace(field_, std::move(text));
      return true;
    }
    if (place_ != Place::Tensor || field_ != "dtype") {
      return other();
    }
    const auto dtype = dtype_of_safetensors_name(text);
    if (!dtype) {
      throw UnsupportedFormat(
          where() + " is of dtype " + in_quotes(text) +
          ", which is not supported");
    }
    tensor_.dtype = *dtype;
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::Before:
        place_ = Place::Header;
        return true;
      case Place::Header:
        place_ =
            tensor_.name == kMetadataName ? Place::Metadata : Place::Tensor;
        has_ = {};
        return true;
      case Place::Tensor:
      case Place::Metadata:
        return other();
      case Place::Numbers:
        break;
    }
    return too_deep();
  }

  bool key(string_t& name) override {
    switch (place_) {
      case Place::Header:
        if (name == kMetadataName && std::exchange(has_metadata_, true)) {
          throw FormatError(kLengthBytes, in_quotes(name) + " appears twice");
        }
        tensor_ = {.name = std::move(name)};
        places_.clear();
        return true;
      case Place::Metadata:
        if (header_.metadata.contains(name)) {
          throw FormatError(kLengthBytes, in_quotes(name) + " appears twice");
        }
        field_ = std::move(name);
        return true;
      default:
        take_field(std::move(name));
        return true;
    }
  }

  bool end_object() override {
    if (place_ == Place::Tensor) {
      finish_tensor();
    }
    place_ = place_ == Place::Header ? Place::Before : Place::Header;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::Numbers) {
      return too_deep();
    }
    if (place_ != Place::Tensor || field_ == "dtype") {
      return other();
    }
    place_ = Place::Numbers;
    return true;
  }

  bool end_array() override {
    place_ = Place::Tensor;
    return true;
  }

  bool parse_error(
      size_t place,
      const std::string&,
      const nlohmann::json::exception& error) override {
    if (dynamic_cast<const nlohmann::json::out_of_range*>(&error)) {
      throw FormatError(kLengthBytes, "JSON with a number that is too large");
    }
    throw FormatError(kLengthBytes + place, "this is not JSON");
  }

 private:
  enum class Place {
    Before, // of the header, or behind it
    Header,
    Metadata,
    Tensor,
    Numbers, // of one of its fields
  };

  std::string where() const {
    return "tensor " + in_quotes(tensor_.name);
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw FormatError(where() + ": " + what);
  }

  bool too_deep() const {
    throw FormatError(kLengthBytes, "JSON nests too deeply");
  }

  std::vector<int64_t>& numbers() {
    return field_ == "shape" ? tensor_.sizes : places_;
  }

  /// A value of a kind that is not allowed here.
  bool other() const {
    switch (place_) {
      case Place::Header:
        if (tensor_.name == kMetadataName) {
          throw FormatError("__metadata__ is not an object");
        }
        throw FormatError(where() + " is not described by three fields");
      case Place::Metadata:
        throw FormatError(
            "__metadata__." + in_quotes(field_) + " is not a string");
      case Place::Tensor:
      case Place::Numbers:
        if (field_ == "dtype") {
          throw FormatError(where() + " has a dtype that is not a string");
        }
        refuse(field_ + " is not a list of sizes");
      case Place::Before:
        break;
    }
    throw FormatError(kLengthBytes, "the header is not an object");
  }

  void take_field(std::string name) {
    const auto found = std::find(kFields.begin(), kFields.end(), name);
    if (found == kFields.end()) {
      throw FormatError(
          where() + " has a field " + in_quotes(name) +
          ", and is described by three fields: dtype, shape, data_offsets");
    }
    if (std::exchange(has_[found - kFields.begin()], true)) {
      throw FormatError(kLengthBytes, in_quotes(name) + " appears twice");
    }
    field_ = std::move(name);
  }

  void finish_tensor() {
    for (size_t i = 0; i < kFields.size(); ++i) {
      if (!has_[i]) {
        throw FormatError(where() + " has no " + std::string(kFields[i]));
      }
    }
    if (places_.size() != 2 || places_[0] > places_[1]) {
      refuse("data_offsets are not a range");
    }
    tensor_.begin = static_cast<uint64_t>(places_[0]);
    tensor_.end = static_cast<uint64_t>(places_[1]);
    const auto bytes =
        checked_bytes(tensor_.sizes, element_bytes(tensor_.dtype));
    if (!bytes ||
        static_cast<uint64_t>(*bytes) != tensor_.end - tensor_.begin) {
      throw FormatError(
          where() + " has " + std::to_string(tensor_.end - tensor_.begin) +
          " bytes, but its shape needs another number");
    }
    tensor_.sizes.shrink_to_fit();
    header_.tensors.push_back(std::move(tensor_));
  }

  static constexpr std::array<std::string_view, 3> kFields{
      "dtype",
      "shape",
      "data_offsets"};

  SafetensorsHeader& header_;
  Place place_ = Place::Before;
  bool has_metadata_ = false;
  SafeTensor tensor_; // the entry being read; its name may be __metadata__
  std::array<bool, kFields.size()> has_{}; // of its fields
  std::vector<int64_t> places_; // its data_offsets
  std::string field_; // of it, or a name in __metadata__
};

void check_unique(const std::vector<SafeTensor>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw FormatError("tensor " + in_quotes(*twice) + " appears twice");
  }
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
  // Not nlohmann's default, which sorts names: readers expect tensors in order.
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
      throw FormatError("metadata " + in_quotes(name) + " is not UTF-8");
    }
  }
  for (const auto& tensor : header.tensors) {
    if (tensor.name == kMetadataName || !is_utf8(tensor.name)) {
      throw FormatError("a tensor cannot be named " + in_quotes(tensor.name));
    }
  }
  check_unique(header.tensors);
}

} // namespace

SafetensorsHeader read_safetensors(const RandomBytes& bytes) {
  SafetensorsHeader header;
  {
    const std::string text = header_text(bytes);
    header.data_offset = kLengthBytes + text.size();
    HeaderHandler handler(&header);
    Json::sax_parse(text, &handler);
  }
  check_unique(header.tensors);
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
