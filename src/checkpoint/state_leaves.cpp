#include "checkpoint/state_leaves.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <unordered_set>
#include <utility>

namespace tessera::checkpoint {

namespace {

using Keys = std::vector<format::DcpPath::Key>;

bool is_leaf(const StateValue& value) {
  if (value.is_dict()) {
    return value.dict().empty();
  }
  if (!value.is_list()) {
    return true;
  }
  for (const StateValue& item : value.list()) {
    if (item.is_tensor() || item.is_sharded() || item.is_dict() ||
        (item.is_list() && !is_leaf(item))) {
      return false;
    }
  }
  return true;
}

std::string text_of(const format::DcpPath::Key& key) {
  const auto* position = std::get_if<int64_t>(&key);
  return position != nullptr ? std::to_string(*position)
                             : std::get<std::string>(key);
}

class Walk {
 public:
  void into(StateDict& dict) {
    for (const StateKey& key : dict.keys()) {
      visit(key.text(), *dict.find(key));
    }
  }

  std::vector<StateLeaf> slots;

 private:
  void visit(format::DcpPath::Key key, StateValue& value) {
    const size_t length = name_.size();
    name_ += (keys_.empty() ? "" : ".") + text_of(key);
    keys_.push_back(std::move(key));
    if (is_leaf(value)) {
      add(value);
    } else if (value.is_dict()) {
      into(value.dict());
    } else {
      for (size_t i = 0; i < value.list().size(); ++i) {
        visit(static_cast<int64_t>(i), value.list()[i]);
      }
    }
    keys_.pop_back();
    name_.resize(length);
  }

  void add(StateValue& value) {
    if (!seen_.insert(name_).second) {
      raise<c10::ValueError>(
          {.call = "checkpoint", .parameter = name_},
          "two values of the state dict have this name once their keys are joined by dots. Rename a key.");
    }
    slots.push_back({name_, keys_, &value});
  }

  std::string name_;
  Keys keys_;
  std::unordered_set<std::string> seen_;
};

/// The value at `key` in `container`, created if it does not exist. No list
/// gets longer than `max_items`, because positions come from files.
StateValue& descend(
    StateValue& container,
    const format::DcpPath::Key& key,
    size_t max_items) {
  if (const auto* position = std::get_if<int64_t>(&key)) {
    if (*position < 0 || static_cast<uint64_t>(*position) >= max_items) {
      raise<c10::ValueError>(
          {.call = "load"},
          fmt::format(
              "the checkpoint has a list with position {}, but only {} values.",
              *position,
              max_items));
    }
    if (container.is_none()) {
      container = StateList();
    }
    auto& list = container.list();
    if (static_cast<size_t>(*position) >= list.size()) {
      list.resize(static_cast<size_t>(*position) + 1);
    }
    return list[static_cast<size_t>(*position)];
  }
  if (container.is_none()) {
    container = StateDict();
  }
  return container.dict()[std::get<std::string>(key)];
}

} // namespace

std::vector<StateLeaf> state_leaves(StateDict& dict) {
  Walk walk;
  walk.into(dict);
  return std::move(walk.slots);
}

StateDict assemble(
    const std::vector<Keys>& keys,
    std::vector<StateValue> values) {
  StateValue root = StateDict();
  for (size_t i = 0; i < keys.size(); ++i) {
    StateValue* at = &root;
    for (const format::DcpPath::Key& key : keys[i]) {
      at = &descend(*at, key, keys.size());
    }
    *at = std::move(values[i]);
  }
  return std::move(root.dict());
}

} // namespace tessera::checkpoint
