#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

class StateDict;
class StateValue;

/// A name or a number, as Python's dictionaries have them: optimizers number
/// their parameters. 0 and "0" are different keys.
class TESSERA_API StateKey {
 public:
  /// Numbers and names become keys where one is expected.
  template <class I>
  requires std::is_integral_v<I> &&(!std::is_same_v<I, bool>)StateKey(I id)
      : key_(static_cast<int64_t>(id)) {}
  StateKey(std::string name) : key_(std::move(name)) {}
  StateKey(std::string_view name) : key_(std::string(name)) {}
  StateKey(const char* name) : key_(std::string(name)) {}

  /// A number.
  bool is_id() const {
    return key_.index() == 0;
  }
  /// Throws c10::ValueError if it is a name.
  int64_t id() const;
  /// Throws c10::ValueError if it is an id.
  const std::string& name() const;
  /// The name, or the digits of the id.
  std::string text() const;

  auto operator<=>(const StateKey&) const = default;

 private:
  std::variant<int64_t, std::string> key_;
};

/// Describes a tensor that is one rank's part of a parameter.
struct TESSERA_API PartOf {
  std::string parameter; // its name, or its number in an optimizer
  std::string unit; // the unit that shards the parameter
  int rank = 0; // whose part
  int num_ranks = 0; // how many ranks have parts
};

/// A list of values, as in Python.
using StateList = std::vector<StateValue>;

/// One value of a state dict. Copying shares tensors, as in Python; clone()
/// does not.
class TESSERA_API StateValue {
 public:
  /// Whatever a state dict may hold becomes a value where one is expected;
  /// nothing and nullptr become None.
  StateValue() = default;
  StateValue(std::nullptr_t) {}
  StateValue(at::Tensor tensor);
  StateValue(ShardedTensor tensor);
  template <class I>
  requires std::is_integral_v<I> &&(!std::is_same_v<I, bool>)StateValue(I value)
      : value_(static_cast<int64_t>(value)) {}
  StateValue(double value) : value_(value) {}
  template <class B>
  requires std::is_same_v<B, bool> StateValue(B value) : value_(value) {}
  StateValue(std::string value) : value_(std::move(value)) {}
  StateValue(const char* value) : value_(std::string(value)) {}
  StateValue(StateList list);
  StateValue(StateDict dict);
  /// A tensor that is this rank's part of a sharded one: what
  /// optimizer.state_dict() and LocalStateDict give. It is used like any
  /// other tensor, but checkpoint::save() refuses it, since parts of several
  /// ranks look like copies of one tensor.
  static StateValue part(at::Tensor tensor, PartOf origin);
  /// A tensor of which ranks may have different values, any of which is good
  /// enough, such as running statistics of a batch norm. checkpoint::save()
  /// compares the values of other tensors that several ranks have; of this
  /// tensor it writes the values of the first rank that has it.
  static StateValue of_any_rank(at::Tensor tensor);
  StateValue(const StateValue& other);
  StateValue(StateValue&& other) noexcept;
  StateValue& operator=(StateValue other) noexcept;
  ~StateValue();

  /// The kind of value.
  bool is_none() const;
  bool is_tensor() const;
  bool is_sharded() const;
  bool is_int() const;
  bool is_double() const;
  bool is_bool() const;
  bool is_string() const;
  bool is_list() const;
  bool is_dict() const;
  /// "tensor", "sharded tensor", "int", ...
  const char* kind() const;

  /// The value. These throw c10::TypeError if it is of another kind; to_double
  /// takes an int too.
  const at::Tensor& tensor() const;
  const ShardedTensor& sharded() const;
  int64_t to_int() const;
  double to_double() const;
  bool to_bool() const;
  const std::string& string() const;
  const StateList& list() const;
  StateList& list();
  const StateDict& dict() const;
  StateDict& dict();

  /// Null unless part() made this value.
  const PartOf* part_of() const {
    return part_of_.get();
  }
  /// True if of_any_rank() made this value.
  bool is_of_any_rank() const {
    return is_of_any_rank_;
  }
  /// This value with another tensor.
  StateValue with_tensor(at::Tensor tensor) const;

  /// Shares no tensor with this one.
  StateValue clone() const;
  /// The same kind and value, tensors bit by bit; see diff_state_dicts().
  bool operator==(const StateValue& other) const;

 private:
  friend class StateDict;
  using DictPtr = std::unique_ptr<StateDict>;
  std::variant<
      std::monostate,
      at::Tensor,
      ShardedTensor,
      int64_t,
      double,
      bool,
      std::string,
      StateList,
      DictPtr>
      value_;
  std::shared_ptr<const PartOf> part_of_; // of tensors
  bool is_of_any_rank_ = false; // of tensors

  template <class T>
  const T& as(const char* wanted) const;
};

/// What model state, optimizer state and checkpoints exchange: an ordered map
/// from keys to values, nested as deep as needed.
///
///   StateDict state{{"step", 3}, {"model", model_state}};
///   state.at_path("model.fc.weight").tensor();
///
/// The order is that of insertion; it does not matter for equality. Copies
/// share tensors, clone() does not. Not thread-safe.
class TESSERA_API StateDict {
 public:
  /// What is iterated over, in the order of insertion.
  using Item = std::pair<StateKey, StateValue>;
  using Items = std::vector<Item>;

  /// Empty, or with these items; a key that appears twice has the last value.
  StateDict();
  StateDict(std::initializer_list<Item> items);
  StateDict(const StateDict& other);
  StateDict(StateDict&& other) noexcept;
  StateDict& operator=(StateDict other) noexcept;
  ~StateDict();

  /// Keys on this level.
  size_t size() const;
  bool empty() const {
    return size() == 0;
  }
  Items::const_iterator begin() const;
  Items::const_iterator end() const;
  std::vector<StateKey> keys() const;

  /// On this level.
  bool contains(const StateKey& key) const {
    return find(key) != nullptr;
  }
  /// Null if there is none. Valid until the next change of this dict.
  const StateValue* find(const StateKey& key) const;
  StateValue* find(const StateKey& key);
  /// Throws c10::ValueError with the nearest key if there is none.
  const StateValue& at(const StateKey& key) const;
  StateValue& at(const StateKey& key);
  /// Adds None at the end if there is none.
  StateValue& operator[](const StateKey& key);
  /// Replaces it in place or adds it at the end.
  void set(const StateKey& key, StateValue value);
  /// False if there was none.
  bool erase(const StateKey& key);

  /// Follows keys and list positions joined by dots, "optim.state.fc.weight":
  /// keys may contain dots themselves. Null if there is nothing.
  const StateValue* find_path(std::string_view path) const;
  /// Throws c10::ValueError that says how far the path led.
  const StateValue& at_path(std::string_view path) const;

  /// Shares no tensor with this one.
  StateDict clone() const;
  /// The same keys and values, in any order; see diff_state_dicts().
  bool operator==(const StateDict& other) const;

  /// One line per value, tensors as dtype, shape and first elements.
  std::string to_string() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

/// Writes to_string().
TESSERA_API std::ostream& operator<<(std::ostream& out, const StateDict& dict);
TESSERA_API std::ostream& operator<<(
    std::ostream& out,
    const StateValue& value);

/// How far values may differ: abs(a - b) <= atol + rtol * abs(b).
struct TESSERA_API DiffTolerance {
  double rtol = 0; // relative
  double atol = 0; // absolute
  /// NaN equals NaN.
  bool equal_nan = true;
};

/// Where two dictionaries differ: one line per difference, at most `max_lines`,
/// then how many more; empty if they agree. Shapes and dtypes must be the same,
/// devices and the order of keys need not; for sharded tensors, this rank's
/// pieces are compared. Not collective.
///
///   optim.state.fc.weight.exp_avg: element [1, 7]: 0.25 against 0.5
TESSERA_API std::string diff_state_dicts(
    const StateDict& a,
    const StateDict& b,
    const DiffTolerance& tolerance = {},
    size_t max_lines = 20);

/// A nested dictionary as one level: leaves by their dotted paths, and for each
/// the keys that lead to it. Empty lists and dicts are leaves, so that nothing
/// is lost.
struct TESSERA_API FlatState {
  /// A value that is neither a dictionary nor a list.
  struct Leaf {
    std::string path; // keys joined by dots
    std::vector<StateKey> keys; // from the outside in
    /// For each key, whether it is a position in a list.
    std::vector<bool> in_list;
    StateValue value; // shares tensors with the dictionary
  };
  std::vector<Leaf> leaves; // in the dictionary's order
};
/// Throws c10::ValueError if two leaves have the same path.
TESSERA_API FlatState flatten_state_dict(const StateDict& dict);
/// Throws c10::ValueError if the leaves do not fit together.
TESSERA_API StateDict unflatten_state_dict(const FlatState& flat);

/// Tensors are written with their values, on the CPU; sharded tensors with this
/// rank's pieces.
TESSERA_API std::vector<uint8_t> state_dict_to_bytes(const StateDict& dict);
/// Reads what state_dict_to_bytes() wrote. Sharded tensors get `group`;
/// without a group they are refused. Throws c10::ValueError for anything else,
/// reading nothing beyond the end and allocating no more than the bytes can
/// fill.
TESSERA_API StateDict state_dict_from_bytes(
    std::span<const uint8_t> bytes,
    const std::optional<Group>& group = std::nullopt);

} // namespace tessera
