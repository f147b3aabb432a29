// Paths into nested states, and states flattened to paths.
#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <charconv>
#include <unordered_set>

namespace tessera {
namespace {

/// The rest of `path` after `key`, if the path begins with it.
std::optional<std::string_view> behind(
    std::string_view path,
    std::string_view key) {
  if (!path.starts_with(key)) {
    return std::nullopt;
  }
  path.remove_prefix(key.size());
  if (path.empty()) {
    return path;
  }
  return path.front() == '.' ? std::optional(path.substr(1)) : std::nullopt;
}

struct Search {
  std::string_view whole;
  size_t reached = 0; // how much of the path exists

  const StateValue* in(const StateValue& value, std::string_view rest) {
    reached = std::max(reached, whole.size() - rest.size());
    if (value.is_dict()) {
      return in(value.dict(), rest);
    }
    if (!value.is_list()) {
      return nullptr;
    }
    const StateList& list = value.list();
    size_t position = 0;
    const auto [end, error] =
        std::from_chars(rest.data(), rest.data() + rest.size(), position);
    if (error != std::errc() || position >= list.size()) {
      return nullptr;
    }
    const auto key = rest.substr(0, static_cast<size_t>(end - rest.data()));
    const auto next = behind(rest, key);
    return next ? follow(list[position], *next, key.size() == rest.size())
                : nullptr;
  }

  /// Keys may contain dots, so every key that the path begins with is tried.
  const StateValue* in(const StateDict& dict, std::string_view rest) {
    for (const auto& [key, value] : dict) {
      const std::string text = key.text();
      if (const auto next = behind(rest, text)) {
        const bool ends = text.size() == rest.size();
        if (const StateValue* found = follow(value, *next, ends)) {
          return found;
        }
      }
    }
    return nullptr;
  }

  const StateValue* follow(
      const StateValue& value,
      std::string_view rest,
      bool ends) {
    return ends ? &value : in(value, rest);
  }
};

struct Flattening {
  FlatState result;
  std::unordered_set<std::string> paths;
  std::vector<StateKey> keys;
  std::vector<bool> in_list;

  void add(const StateValue& value) {
    const bool nests = (value.is_dict() && !value.dict().empty()) ||
        (value.is_list() && !value.list().empty());
    if (!nests) {
      add_leaf(value);
    } else if (value.is_dict()) {
      for (const auto& [key, child] : value.dict()) {
        descend(key, /*list=*/false, child);
      }
    } else {
      for (size_t i = 0; i < value.list().size(); ++i) {
        descend(i, /*list=*/true, value.list()[i]);
      }
    }
  }

  void descend(const StateKey& key, bool list, const StateValue& child) {
    keys.push_back(key);
    in_list.push_back(list);
    add(child);
    keys.pop_back();
    in_list.pop_back();
  }

  void add_leaf(const StateValue& value) {
    std::string path;
    for (const StateKey& key : keys) {
      path += (path.empty() ? "" : ".") + key.text();
    }
    if (!paths.insert(path).second) {
      raise<c10::ValueError>(
          {.call = "flatten_state_dict"},
          fmt::format(
              "two values have the path \"{}\": keys that contain dots, or 0 beside \"0\". Rename one.",
              path));
    }
    result.leaves.push_back({path, keys, in_list, value});
  }
};

[[noreturn]] void refuse_leaf(const FlatState::Leaf& leaf, const char* what) {
  raise<c10::ValueError>(
      {.call = "unflatten_state_dict"},
      fmt::format("\"{}\": {}", leaf.path, what));
}

} // namespace

const StateValue* StateDict::find_path(std::string_view path) const {
  return Search{path}.in(*this, path);
}

const StateValue& StateDict::at_path(std::string_view path) const {
  Search search{path};
  if (const StateValue* found = search.in(*this, path)) {
    return *found;
  }
  const std::string_view known = path.substr(0, search.reached);
  raise<c10::ValueError>(
      {.call = "StateDict"},
      fmt::format(
          "nothing at \"{}\": {}.",
          path,
          known.empty()
              ? "no key leads there"
              : fmt::format(
                    "\"{}\" exists, but \"{}\" is not in it",
                    known.ends_with('.') ? known.substr(0, known.size() - 1)
                                         : known,
                    path.substr(search.reached))));
}

FlatState flatten_state_dict(const StateDict& dict) {
  Flattening flattening;
  for (const auto& [key, value] : dict) {
    flattening.descend(key, /*list=*/false, value);
  }
  return std::move(flattening.result);
}

StateDict unflatten_state_dict(const FlatState& flat) {
  StateValue root = StateDict();
  for (const FlatState::Leaf& leaf : flat.leaves) {
    if (leaf.keys.empty() || leaf.keys.size() != leaf.in_list.size() ||
        leaf.in_list.front()) {
      refuse_leaf(leaf, "its keys do not start in a dictionary.");
    }
    StateValue* at = &root;
    for (size_t i = 0; i < leaf.keys.size(); ++i) {
      const StateKey& key = leaf.keys[i];
      if (leaf.in_list[i]) {
        if (at->is_none()) {
          *at = StateList();
        }
        if (!at->is_list() || !key.is_id() || key.id() < 0 ||
            static_cast<size_t>(key.id()) > at->list().size()) {
          refuse_leaf(
              leaf, "its positions in a list do not follow each other.");
        }
        StateList& list = at->list();
        if (static_cast<size_t>(key.id()) == list.size()) {
          list.emplace_back();
        }
        at = &list[static_cast<size_t>(key.id())];
      } else {
        if (at->is_none()) {
          *at = StateDict();
        }
        if (!at->is_dict()) {
          refuse_leaf(leaf, "another leaf stands where its parent should be.");
        }
        at = &at->dict()[key];
      }
    }
    if (!at->is_none()) {
      refuse_leaf(leaf, "appears twice, or is the parent of another leaf.");
    }
    *at = leaf.value;
  }
  return std::move(root.dict());
}

} // namespace tessera
