#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <ATen/ops/clone.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "state/nearest.h"

namespace tessera {
namespace {

struct KeyHash {
  size_t operator()(const StateKey& key) const {
    return key.is_id() ? std::hash<int64_t>()(key.id())
                       : std::hash<std::string>()(key.name());
  }
};

} // namespace

int64_t StateKey::id() const {
  if (const auto* id = std::get_if<int64_t>(&key_)) {
    return *id;
  }
  raise<c10::ValueError>(
      {.call = "StateKey"},
      fmt::format("\"{}\" is a name, asked for an id.", name()));
}

const std::string& StateKey::name() const {
  if (const auto* name = std::get_if<std::string>(&key_)) {
    return *name;
  }
  raise<c10::ValueError>(
      {.call = "StateKey"},
      fmt::format("{} is an id, asked for a name.", id()));
}

std::string StateKey::text() const {
  return is_id() ? std::to_string(id()) : name();
}

StateValue::StateValue(at::Tensor tensor) : value_(std::move(tensor)) {}
StateValue::StateValue(ShardedTensor tensor) : value_(std::move(tensor)) {}
StateValue::StateValue(StateList list) : value_(std::move(list)) {}
StateValue::StateValue(StateDict dict)
    : value_(std::make_unique<StateDict>(std::move(dict))) {}
StateValue::StateValue(StateValue&& other) noexcept = default;
StateValue::~StateValue() = default;

StateValue StateValue::part(at::Tensor tensor, PartOf origin) {
  StateValue value(std::move(tensor));
  value.part_of_ = std::make_shared<const PartOf>(std::move(origin));
  return value;
}

StateValue StateValue::of_any_rank(at::Tensor tensor) {
  StateValue value(std::move(tensor));
  value.is_of_any_rank_ = true;
  return value;
}

StateValue StateValue::with_tensor(at::Tensor tensor) const {
  StateValue value(std::move(tensor));
  value.part_of_ = part_of_;
  value.is_of_any_rank_ = is_of_any_rank_;
  return value;
}

StateValue::StateValue(const StateValue& other)
    : part_of_(other.part_of_), is_of_any_rank_(other.is_of_any_rank_) {
  std::visit(
      [this](const auto& value) {
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, DictPtr>) {
          value_ = std::make_unique<StateDict>(*value);
        } else {
          value_ = value;
        }
      },
      other.value_);
}

StateValue& StateValue::operator=(StateValue other) noexcept {
  value_ = std::move(other.value_);
  part_of_ = std::move(other.part_of_);
  is_of_any_rank_ = other.is_of_any_rank_;
  return *this;
}

bool StateValue::is_none() const {
  return std::holds_alternative<std::monostate>(value_);
}
bool StateValue::is_tensor() const {
  return std::holds_alternative<at::Tensor>(value_);
}
bool StateValue::is_sharded() const {
  return std::holds_alternative<ShardedTensor>(value_);
}
bool StateValue::is_int() const {
  return std::holds_alternative<int64_t>(value_);
}
bool StateValue::is_double() const {
  return std::holds_alternative<double>(value_);
}
bool StateValue::is_bool() const {
  return std::holds_alternative<bool>(value_);
}
bool StateValue::is_string() const {
  return std::holds_alternative<std::string>(value_);
}
bool StateValue::is_list() const {
  return std::holds_alternative<StateList>(value_);
}
bool StateValue::is_dict() const {
  return std::holds_alternative<DictPtr>(value_);
}

const char* StateValue::kind() const {
  static constexpr const char* kKinds[] = {
      "None",
      "tensor",
      "sharded tensor",
      "int",
      "double",
      "bool",
      "string",
      "list",
      "dict"};
  return kKinds[value_.index()];
}

template <class T>
const T& StateValue::as(const char* wanted) const {
  if (const T* value = std::get_if<T>(&value_)) {
    return *value;
  }
  raise<c10::TypeError>(
      {.call = "StateValue"},
      fmt::format("holds a {}, asked for a {}.", kind(), wanted));
}

const at::Tensor& StateValue::tensor() const {
  return as<at::Tensor>("tensor");
}
const ShardedTensor& StateValue::sharded() const {
  return as<ShardedTensor>("sharded tensor");
}
int64_t StateValue::to_int() const {
  return as<int64_t>("int");
}
double StateValue::to_double() const {
  return is_int() ? static_cast<double>(to_int()) : as<double>("double");
}
bool StateValue::to_bool() const {
  return as<bool>("bool");
}
const std::string& StateValue::string() const {
  return as<std::string>("string");
}
const StateList& StateValue::list() const {
  return as<StateList>("list");
}
StateList& StateValue::list() {
  return const_cast<StateList&>(std::as_const(*this).list());
}
const StateDict& StateValue::dict() const {
  return *as<DictPtr>("dict");
}
StateDict& StateValue::dict() {
  return const_cast<StateDict&>(std::as_const(*this).dict());
}

StateValue StateValue::clone() const {
  if (is_tensor()) {
    return tensor().defined() ? with_tensor(tensor().detach().clone()) : *this;
  }
  if (is_sharded()) {
    const ShardedTensor& from = sharded();
    std::vector<ShardedTensor::Piece> pieces;
    for (const auto& piece : from.pieces()) {
      pieces.push_back({piece.box, piece.tensor.detach().clone()});
    }
    return ShardedTensor(
        from.sizes(), from.dtype(), std::move(pieces), from.group());
  }
  if (is_list()) {
    StateList copy;
    for (const StateValue& item : list()) {
      copy.push_back(item.clone());
    }
    return copy;
  }
  return is_dict() ? StateValue(dict().clone()) : *this;
}

struct StateDict::Data {
  Items items;
  std::unordered_map<StateKey, size_t, KeyHash> index; // into items
};

StateDict::StateDict() : data_(std::make_unique<Data>()) {}

StateDict::StateDict(std::initializer_list<Item> items) : StateDict() {
  for (const auto& [key, value] : items) {
    set(key, value);
  }
}

StateDict::StateDict(const StateDict& other)
    : data_(std::make_unique<Data>(*other.data_)) {}
StateDict::StateDict(StateDict&& other) noexcept
    : data_(std::move(other.data_)) {
  other.data_ = std::make_unique<Data>(); // stays usable, empty
}
StateDict& StateDict::operator=(StateDict other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}
StateDict::~StateDict() = default;

size_t StateDict::size() const {
  return data_->items.size();
}
StateDict::Items::const_iterator StateDict::begin() const {
  return data_->items.begin();
}
StateDict::Items::const_iterator StateDict::end() const {
  return data_->items.end();
}

std::vector<StateKey> StateDict::keys() const {
  std::vector<StateKey> keys;
  for (const auto& [key, value] : *this) {
    keys.push_back(key);
  }
  return keys;
}

const StateValue* StateDict::find(const StateKey& key) const {
  // Small dictionaries, such as an optimizer's state per parameter, are
  // searched.
  constexpr size_t kSmall = 8;
  if (size() <= kSmall) {
    for (const auto& [other, value] : *this) {
      if (other == key) {
        return &value;
      }
    }
    return nullptr;
  }
  const auto found = data_->index.find(key);
  return found == data_->index.end() ? nullptr
                                     : &data_->items[found->second].second;
}

StateValue* StateDict::find(const StateKey& key) {
  return const_cast<StateValue*>(std::as_const(*this).find(key));
}

const StateValue& StateDict::at(const StateKey& key) const {
  if (const StateValue* value = find(key)) {
    return *value;
  }
  std::vector<std::string> names;
  for (const auto& [other, value] : *this) {
    names.push_back(other.text());
  }
  raise<c10::ValueError>(
      {.call = "StateDict"},
      fmt::format(
          "no key {}{}; it has {} keys.{}",
          key.is_id() ? "" : "\"",
          key.text() + (key.is_id() ? "" : "\""),
          size(),
          state::did_you_mean(key.text(), names)));
}

StateValue& StateDict::at(const StateKey& key) {
  return const_cast<StateValue&>(std::as_const(*this).at(key));
}

StateValue& StateDict::operator[](const StateKey& key) {
  if (StateValue* value = find(key)) {
    return *value;
  }
  data_->index.emplace(key, size());
  data_->items.emplace_back(key, StateValue());
  return data_->items.back().second;
}

void StateDict::set(const StateKey& key, StateValue value) {
  (*this)[key] = std::move(value);
}

bool StateDict::erase(const StateKey& key) {
  const auto found = data_->index.find(key);
  if (found == data_->index.end()) {
    return false;
  }
  const size_t position = found->second;
  data_->index.erase(found);
  data_->items.erase(
      data_->items.begin() + static_cast<std::ptrdiff_t>(position));
  for (auto& [other, place] : data_->index) {
    place -= place > position ? 1 : 0;
  }
  return true;
}

StateDict StateDict::clone() const {
  StateDict copy;
  for (const auto& [key, value] : *this) {
    copy.set(key, value.clone());
  }
  return copy;
}

} // namespace tessera
