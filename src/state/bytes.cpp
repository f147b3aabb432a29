// States as bytes, as sent between ranks.
#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/byte_vector.h"

namespace tessera {
namespace {

/// [Note: state bytes]
///
///   state   magic (8 bytes) dict
///   dict    count (key value)*
///   key     'i' int64 | 's' text
///   value   tag, then by tag what it needs; tensors: dtype, dims, elements
///
/// Numbers are 8 bytes in the host's order: both ends are ranks of one program.
/// The reader trusts nothing: every length is checked against the remaining
/// bytes before anything is allocated.
constexpr char kMagic[] = "tsstate1";
constexpr int kMaxDepth = 64;
constexpr uint64_t kMaxDims = 64;
constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 62;

/// Only dtypes whose elements are whole bytes, each a number.
bool has_elements(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kBFloat16:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
      return true;
    default:
      return false;
  }
}

enum class Tag : uint8_t {
  None,
  Tensor,
  Undefined,
  Sharded,
  Int,
  Double,
  Bool,
  String,
  List,
  Dict,
  Id,
};

class Writer {
 public:
  void raw(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }
  void tag(Tag tag) {
    raw(&tag, sizeof tag);
  }
  template <class T>
  void number(T value) {
    static_assert(sizeof(T) == 8);
    raw(&value, sizeof value);
  }
  void text(const std::string& text) {
    number<uint64_t>(text.size());
    raw(text.data(), text.size());
  }
  void sizes(at::IntArrayRef sizes) {
    number<uint64_t>(sizes.size());
    for (const int64_t size : sizes) {
      number(size);
    }
  }
  void key(const StateKey& key) {
    if (key.is_id()) {
      tag(Tag::Id);
      number(key.id());
    } else {
      tag(Tag::String);
      text(key.name());
    }
  }
  void tensor(const at::Tensor& tensor) {
    const at::Tensor here = tensor.detach().cpu().contiguous();
    number<int64_t>(static_cast<int64_t>(here.scalar_type()));
    sizes(here.sizes());
    raw(here.const_data_ptr(), here.nbytes());
  }
  void value(const StateValue& value) {
    if (value.is_none()) {
      tag(Tag::None);
    } else if (value.is_tensor() && !value.tensor().defined()) {
      tag(Tag::Undefined);
    } else if (value.is_tensor()) {
      tag(Tag::Tensor);
      tensor(value.tensor());
    } else if (value.is_sharded()) {
      tag(Tag::Sharded);
      sharded(value.sharded());
    } else if (value.is_int()) {
      tag(Tag::Int);
      number(value.to_int());
    } else if (value.is_double()) {
      tag(Tag::Double);
      number(value.to_double());
    } else if (value.is_bool()) {
      tag(Tag::Bool);
      number<int64_t>(value.to_bool() ? 1 : 0);
    } else if (value.is_string()) {
      tag(Tag::String);
      text(value.string());
    } else if (value.is_list()) {
      tag(Tag::List);
      number<uint64_t>(value.list().size());
      for (const StateValue& item : value.list()) {
        this->value(item);
      }
    } else {
      tag(Tag::Dict);
      dict(value.dict());
    }
  }
  void dict(const StateDict& dict) {
    number<uint64_t>(dict.size());
    for (const auto& [key, value] : dict) {
      this->key(key);
      this->value(value);
    }
  }
  Bytes take() {
    return std::move(bytes_);
  }

 private:
  void sharded(const ShardedTensor& tensor) {
    number<int64_t>(static_cast<int64_t>(tensor.dtype()));
    sizes(tensor.sizes());
    number<uint64_t>(tensor.pieces().size());
    for (const auto& piece : tensor.pieces()) {
      sizes(piece.box.offsets);
      sizes(piece.box.sizes);
      this->tensor(piece.tensor);
    }
  }

  Bytes bytes_;
};

class Reader {
 public:
  Reader(std::span<const uint8_t> bytes, const std::optional<Group>& group)
      : all_(bytes), rest_(bytes), group_(group) {}

  void magic() {
    if (rest_.size() < sizeof kMagic - 1 ||
        std::memcmp(rest_.data(), kMagic, sizeof kMagic - 1) != 0) {
      refuse("these bytes are not a state of this version");
    }
    rest_ = rest_.subspan(sizeof kMagic - 1);
  }
  void end() {
    if (!rest_.empty()) {
      refuse(fmt::format("{} bytes too many", rest_.size()));
    }
  }
  StateDict dict(int depth) {
    if (depth > kMaxDepth) {
      refuse("nested too deeply");
    }
    StateDict result;
    const uint64_t count = length(/*least_each=*/2);
    for (uint64_t i = 0; i < count; ++i) {
      StateKey name = key();
      if (result.contains(name)) {
        refuse("the key " + name.text() + " comes twice");
      }
      result.set(name, value(depth + 1));
    }
    return result;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) {
    raise<c10::ValueError>(
        {.call = "state_dict_from_bytes"},
        fmt::format("byte {}: {}.", all_.size() - rest_.size(), what));
  }
  std::span<const uint8_t> raw(uint64_t size) {
    if (size > rest_.size()) {
      refuse(fmt::format("{} bytes expected, {} are left", size, rest_.size()));
    }
    const auto part = rest_.first(size);
    rest_ = rest_.subspan(size);
    return part;
  }
  template <class T>
  T number() {
    static_assert(sizeof(T) == 8);
    T value;
    std::memcpy(&value, raw(sizeof value).data(), sizeof value);
    return value;
  }
  Tag tag() {
    return static_cast<Tag>(raw(1)[0]);
  }
  /// A count of items that take at least this many bytes each.
  uint64_t length(uint64_t least_each) {
    const auto count = number<uint64_t>();
    if (count > rest_.size() / least_each) {
      refuse(fmt::format(
          "a count of {}, where {} bytes are left", count, rest_.size()));
    }
    return count;
  }
  std::string text() {
    const auto part = raw(length(1));
    return {part.begin(), part.end()};
  }
  std::vector<int64_t> sizes() {
    const uint64_t count = length(8);
    if (count > kMaxDims) {
      refuse(fmt::format("a tensor of {} dims", count));
    }
    std::vector<int64_t> result;
    for (uint64_t i = 0; i < count; ++i) {
      result.push_back(number<int64_t>());
      if (result.back() < 0) {
        refuse("a negative size");
      }
    }
    return result;
  }
  at::ScalarType dtype() {
    const auto number = this->number<int64_t>();
    const auto dtype = static_cast<at::ScalarType>(number);
    if (number < 0 || number > std::numeric_limits<int8_t>::max() ||
        !has_elements(dtype)) {
      refuse(fmt::format("no dtype of tensors here has the number {}", number));
    }
    return dtype;
  }
  StateKey key() {
    switch (tag()) {
      case Tag::Id:
        return number<int64_t>();
      case Tag::String:
        return text();
      default:
        refuse("no key");
    }
  }
  at::Tensor tensor() {
    const at::ScalarType type = dtype();
    const std::vector<int64_t> shape = sizes();
    uint64_t bytes = c10::elementSize(type);
    bool is_empty = false;
    for (const int64_t size : shape) { // strides are products too
      is_empty = is_empty || size == 0;
      const auto factor = static_cast<uint64_t>(std::max<int64_t>(size, 1));
      if (__builtin_mul_overflow(bytes, factor, &bytes) ||
          bytes > kMaxTensorBytes) {
        refuse("a tensor larger than memory");
      }
    }
    bytes = is_empty ? 0 : bytes;
    const auto data = raw(bytes);
    const at::Tensor result = at::empty(shape, type);
    if (!data.empty()) {
      std::memcpy(result.mutable_data_ptr(), data.data(), data.size());
    }
    return result;
  }
  ShardedTensor sharded() {
    if (!group_) {
      refuse("a sharded tensor, which needs a group");
    }
    const at::ScalarType type = dtype();
    auto shape = sizes();
    std::vector<ShardedTensor::Piece> pieces(length(16));
    for (auto& piece : pieces) {
      piece.box.offsets = sizes();
      piece.box.sizes = sizes();
      piece.tensor = tensor();
    }
    return ShardedTensor(std::move(shape), type, std::move(pieces), *group_);
  }
  StateValue value(int depth) {
    if (depth > kMaxDepth) {
      refuse("nested too deeply");
    }
    switch (tag()) {
      case Tag::None:
        return {};
      case Tag::Tensor:
        return tensor();
      case Tag::Undefined:
        return at::Tensor();
      case Tag::Sharded:
        return sharded();
      case Tag::Int:
        return number<int64_t>();
      case Tag::Double:
        return number<double>();
      case Tag::Bool:
        return number<int64_t>() != 0;
      case Tag::String:
        return text();
      case Tag::List: {
        StateList list;
        const uint64_t count = length(1);
        for (uint64_t i = 0; i < count; ++i) {
          list.push_back(value(depth + 1));
        }
        return list;
      }
      case Tag::Dict:
        return dict(depth);
      case Tag::Id:
        break;
    }
    refuse("no value");
  }

  const std::span<const uint8_t> all_;
  std::span<const uint8_t> rest_;
  const std::optional<Group>& group_;
};

} // namespace

Bytes state_dict_to_bytes(const StateDict& dict) {
  Writer writer;
  writer.raw(kMagic, sizeof kMagic - 1);
  writer.dict(dict);
  return writer.take();
}

StateDict state_dict_from_bytes(
    std::span<const uint8_t> bytes,
    const std::optional<Group>& group) {
  Reader reader(bytes, group);
  reader.magic();
  StateDict result = reader.dict(0);
  reader.end();
  return result;
}

} // namespace tessera
