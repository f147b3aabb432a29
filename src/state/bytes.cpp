// States as bytes, as sent between ranks.
#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/byte_stream.h"
#include "base/byte_vector.h"

namespace tessera {
namespace {

/// [Note: state bytes]
///
///   state   magic (8 bytes) dict
///   dict    count (key value)*
///   key     'i' int64 | 's' text
///   value   tag, then by tag what it needs; tensors: dtype, dims, elements
///   mark    tag, before the tensor's value: 'part' and of what, or 'any rank'
///
/// Numbers are 8 bytes in the host's order: both ends are ranks of one program.
constexpr char kMagic[] = "tsstate2";
constexpr int kMaxDepth = 64;
constexpr uint64_t kMaxDims = 64;
constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 62;

/// Whether elements of `dtype` are numbers of whole bytes.
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
  Part,
  OfAnyRank,
};

class Writer : public ByteWriter {
 public:
  void tag(Tag tag) {
    byte(static_cast<uint8_t>(tag));
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
    number(static_cast<int64_t>(here.scalar_type()));
    numbers(here.sizes());
    raw(here.const_data_ptr(), here.nbytes());
  }
  void value(const StateValue& value) {
    marks(value);
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
      number(value.to_bool() ? 1 : 0);
    } else if (value.is_string()) {
      tag(Tag::String);
      text(value.string());
    } else if (value.is_list()) {
      tag(Tag::List);
      number(value.list().size());
      for (const StateValue& item : value.list()) {
        this->value(item);
      }
    } else {
      tag(Tag::Dict);
      dict(value.dict());
    }
  }
  void dict(const StateDict& dict) {
    number(dict.size());
    for (const auto& [key, value] : dict) {
      this->key(key);
      this->value(value);
    }
  }

 private:
  /// What the tensor itself does not say: without the marks, parts of several
  /// ranks would pass for copies of one tensor.
  void marks(const StateValue& value) {
    if (const PartOf* part = value.part_of()) {
      tag(Tag::Part);
      text(part->parameter);
      text(part->unit);
      number(part->rank);
      number(part->num_ranks);
    }
    if (value.is_of_any_rank()) {
      tag(Tag::OfAnyRank);
    }
  }
  void sharded(const ShardedTensor& tensor) {
    number(static_cast<int64_t>(tensor.dtype()));
    numbers(tensor.sizes());
    number(tensor.pieces().size());
    for (const auto& piece : tensor.pieces()) {
      numbers(piece.box.offsets);
      numbers(piece.box.sizes);
      this->tensor(piece.tensor);
    }
  }
};

class Reader : ByteReader {
 public:
  Reader(std::span<const uint8_t> bytes, const std::optional<Group>& group)
      : ByteReader(bytes), group_(group) {}

  void magic() {
    constexpr size_t kSize = sizeof kMagic - 1;
    const ByteReader before = *this; // whose place the error names
    if (left() < kSize || std::memcmp(raw(kSize).data(), kMagic, kSize) != 0) {
      before.refuse("these bytes are not a state of this version");
    }
  }
  void end() {
    if (left() > 0) {
      refuse(fmt::format("{} bytes too many", left()));
    }
  }
  StateDict dict(int depth) {
    if (depth > kMaxDepth) {
      refuse("nested too deeply");
    }
    StateDict result;
    const uint64_t count = this->count(/*least_each=*/2);
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
  Tag tag() {
    return static_cast<Tag>(byte());
  }
  std::vector<int64_t> sizes() {
    const uint64_t count = this->count(8);
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
  PartOf part_of() {
    PartOf part;
    part.parameter = text();
    part.unit = text();
    const auto rank = number<int64_t>();
    const auto num_ranks = number<int64_t>();
    if (rank < 0 || rank >= num_ranks ||
        num_ranks > std::numeric_limits<int>::max()) {
      refuse(fmt::format("a part of rank {} of {}", rank, num_ranks));
    }
    part.rank = static_cast<int>(rank);
    part.num_ranks = static_cast<int>(num_ranks);
    return part;
  }
  /// The tensor behind a mark.
  at::Tensor marked() {
    switch (tag()) {
      case Tag::Tensor:
        return tensor();
      case Tag::Undefined:
        return {};
      default:
        refuse("a mark before a value that is no tensor");
    }
  }
  ShardedTensor sharded() {
    if (!group_) {
      refuse("a sharded tensor, which needs a group");
    }
    const at::ScalarType type = dtype();
    auto shape = sizes();
    std::vector<ShardedTensor::Piece> pieces(count(16));
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
        const uint64_t count = this->count(1);
        for (uint64_t i = 0; i < count; ++i) {
          list.push_back(value(depth + 1));
        }
        return list;
      }
      case Tag::Dict:
        return dict(depth);
      case Tag::Part: {
        PartOf part = part_of();
        return StateValue::part(marked(), std::move(part));
      }
      case Tag::OfAnyRank:
        return StateValue::of_any_rank(marked());
      case Tag::Id:
        break;
    }
    refuse("no value");
  }

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
  try {
    Reader reader(bytes, group);
    reader.magic();
    StateDict result = reader.dict(0);
    reader.end();
    return result;
  } catch (const BadBytes& error) {
    raise<c10::ValueError>({.call = "state_dict_from_bytes"}, error.what());
  }
}

} // namespace tessera
