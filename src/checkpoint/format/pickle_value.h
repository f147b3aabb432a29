// The values that a pickle of torch can hold, as plain data.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace tessera::format {

struct Value;
struct DictItem;

struct None {
  bool operator==(const None&) const = default;
};

struct Bytes {
  std::string data;
  bool operator==(const Bytes&) const = default;
};

struct Complex {
  double real = 0;
  double imag = 0;
  bool operator==(const Complex&) const = default;
};

struct List {
  std::vector<Value> items;
  bool operator==(const List& other) const;
};

struct Tuple {
  std::vector<Value> items;
  bool operator==(const Tuple& other) const;
};

struct Set {
  std::vector<Value> items;
  bool operator==(const Set& other) const;
};

/// A dictionary in the order it was written, with keys of any kind.
struct Dict {
  std::vector<DictItem> items;

  /// The last item with this name, which Python would keep; null if there is
  /// none.
  const Value* find(std::string_view name) const;
  /// Adds an item at the end.
  void add(Value key, Value value);
  bool operator==(const Dict& other) const;
};

/// torch.Size.
struct Size {
  std::vector<int64_t> dims;
  bool operator==(const Size&) const = default;
};

/// torch.device, "cuda:0".
struct Device {
  std::string name;
  bool operator==(const Device&) const = default;
};

/// torch.layout, "torch.strided".
struct Layout {
  std::string name;
  bool operator==(const Layout&) const = default;
};

/// torch.memory_format, by the numbers that DCP gives them.
enum class MemoryFormat : uint8_t {
  Contiguous,
  ChannelsLast,
  Preserve,
};

/// pathlib.Path, its parts joined.
struct Path {
  std::string name;
  bool operator==(const Path&) const = default;
};

/// Memory that a torch file keeps in an entry of its own.
struct Storage {
  std::string key; // of the entry, "0"
  std::optional<DType> dtype; // none: untyped
  std::string location; // where it was, "cpu" or "cuda:0"
  int64_t numel = 0; // of the dtype; bytes if untyped

  bool operator==(const Storage&) const = default;
};

/// A view of a storage. `offset` and `strides` count elements.
struct Tensor {
  Storage storage;
  DType dtype = DType::Float32;
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool requires_grad = false;
  bool is_parameter = false;
  bool conj = false;
  bool neg = false;

  bool operator==(const Tensor&) const = default;
};

/// Classes of torch.distributed.checkpoint.
enum class Class : uint8_t {
  Metadata,
  TensorStorageMetadata,
  BytesStorageMetadata,
  ChunkStorageMetadata,
  TensorProperties,
  MetadataIndex,
  StorageInfo,
  StorageMeta,
};

struct Object;

/// Owns a T on the heap and copies it with itself, which keeps Value small.
template <class T>
class Box {
 public:
  Box(T value) : value_(std::make_unique<T>(std::move(value))) {}
  Box(const Box& other) : value_(std::make_unique<T>(*other.value_)) {}
  Box(Box&& other) noexcept = default;
  Box& operator=(Box other) noexcept {
    value_.swap(other.value_);
    return *this;
  }
  const T& operator*() const {
    return *value_;
  }
  const T* operator->() const {
    return value_.get();
  }
  T& operator*() {
    return *value_;
  }
  T* operator->() {
    return value_.get();
  }
  bool operator==(const Box& other) const {
    return *value_ == *other.value_;
  }

 private:
  std::unique_ptr<T> value_;
};

struct Value {
  using Variant = std::variant<
      None,
      bool,
      int64_t,
      double,
      std::string, // UTF-8
      Bytes,
      Complex,
      List,
      Tuple,
      Set,
      Dict,
      Size,
      DType,
      Device,
      Layout,
      MemoryFormat,
      Path,
      Box<Storage>,
      Box<Tensor>,
      Box<Object>>;

  Variant is;

  Value();
  template <class T>
  // NOLINTNEXTLINE(bugprone-forwarding-reference-overload): no Value is a T
  requires(!std::is_same_v<std::remove_cvref_t<T>, Value>) Value(T&& value);
  Value(const char* text);
  Value(int value);
  Value(Storage value);
  Value(Tensor value);
  Value(Object value);
  Value(const Value& other);
  Value(Value&& other) noexcept;
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();

  /// Null if the value is of another kind.
  template <class T>
  const T* get() const {
    return std::get_if<T>(&is);
  }

  /// "a dict", for messages.
  std::string_view kind() const;
  bool operator==(const Value& other) const;
};

struct DictItem {
  Value key;
  Value value;
  bool operator==(const DictItem&) const = default;
};

/// An instance of a known class, as its BUILD gave it: a dict of fields or, for
/// TensorProperties, a tuple.
struct Object {
  Class cls;
  Value state;
  bool operator==(const Object&) const = default;
};

// Defined down here, where DictItem and Object are complete.
template <class T>
// NOLINTNEXTLINE(bugprone-forwarding-reference-overload): no Value is a T
requires(!std::is_same_v<std::remove_cvref_t<T>, Value>) Value::Value(T&& value)
    : is(std::forward<T>(value)) {}
inline Value::Value() = default;
inline Value::Value(const Value&) = default;
inline Value::Value(Value&&) noexcept = default;
inline Value& Value::operator=(const Value&) = default;
inline Value& Value::operator=(Value&&) noexcept = default;
inline Value::~Value() = default;

} // namespace tessera::format
