#include "transfer/wanted_state.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "state/describe.h"
#include "transfer/optim_dict_form.h"

namespace tessera::transfer {
namespace {

std::string keys_text(const std::vector<StateKey>& keys) {
  std::vector<std::string> names;
  for (const StateKey& key : keys) {
    names.push_back(key.text());
  }
  return fmt::format("[{}]", fmt::join(names, ", "));
}

void check_names(
    const std::vector<const ModelParam*>& members,
    const std::vector<const StateDict*>& entries,
    const StateDict& first,
    std::string_view call) {
  for (size_t i = 0; i < members.size(); ++i) {
    if (entries[i] == nullptr) {
      continue;
    }
    auto ours = entries[i]->keys();
    auto theirs = first.keys();
    std::sort(ours.begin(), ours.end());
    std::sort(theirs.begin(), theirs.end());
    if (ours != theirs) {
      raise<c10::ValueError>(
          {.call = call, .parameter = members[i]->name},
          fmt::format(
              "Differing optimizer state names for the parameters of one flat parameter: {} against {}.",
              keys_text(ours),
              keys_text(theirs)));
    }
  }
}

/// The text is PyTorch's, whose tests compare how it begins.
[[noreturn]] void refuse_scalars(
    const std::string& name,
    const std::vector<const ModelParam*>& members,
    const std::vector<const StateDict*>& entries) {
  std::string text =
      "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype. Got for \"" +
      name + "\":";
  for (size_t i = 0; i < members.size(); ++i) {
    const StateValue* value =
        entries[i] == nullptr ? nullptr : entries[i]->find(name);
    text += fmt::format(
        "{} {}: {}",
        i == 0 ? "" : ",",
        members[i]->name,
        value == nullptr ? "nothing" : state::describe(*value));
  }
  raise<c10::ValueError>({}, text + ".");
}

/// One state of a leaf from the states of its members.
WantedState combine(
    const std::string& name,
    const std::vector<const ModelParam*>& members,
    const std::vector<const StateDict*>& entries,
    std::string_view call) {
  WantedState wanted{name, std::nullopt, {}, {}};
  bool is_first = true;
  bool is_tensor = false;
  bool is_missing = false;
  for (size_t i = 0; i < members.size(); ++i) {
    const StateValue* value =
        entries[i] == nullptr ? nullptr : entries[i]->find(name);
    wanted.by_member.push_back(value);
    if (value == nullptr) {
      is_missing = true;
      continue;
    }
    const auto shape = members[i]->shape();
    const auto like = tensor_like(name, *value, shape);
    if (like && like->sizes != shape) {
      raise<c10::ValueError>(
          {.call = call, .parameter = members[i]->name},
          fmt::format(
              "its state \"{}\" has the shape [{}], the parameter [{}].",
              name,
              fmt::join(like->sizes, ", "),
              fmt::join(shape, ", ")));
    }
    if (is_first) {
      is_tensor = like.has_value();
      wanted.value = like ? StateValue() : value->clone();
      wanted.dtype = like ? std::optional(like->dtype) : std::nullopt;
      is_first = false;
    } else if (
        is_tensor != like.has_value() ||
        (like && *wanted.dtype != like->dtype)) {
      raise<c10::ValueError>(
          {.call = call, .parameter = members[i]->name},
          fmt::format(
              "its state \"{}\" is {}, that of the other parameters in one flat parameter is not.",
              name,
              state::describe(*value)));
    } else if (!is_tensor && wanted.value != *value) {
      refuse_scalars(name, members, entries);
    }
  }
  if (!is_tensor && is_missing) {
    refuse_scalars(name, members, entries);
  }
  return wanted;
}

std::optional<std::vector<WantedState>> states_for(
    const std::vector<const ModelParam*>& members,
    const StateDict& state,
    std::string_view call) {
  std::vector<const StateDict*> entries; // by member, null for none
  const StateDict* first = nullptr;
  for (const ModelParam* member : members) {
    const StateValue* entry = state.find(member->name);
    entries.push_back(entry == nullptr ? nullptr : &entry->dict());
    first = first == nullptr ? entries.back() : first;
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  check_names(members, entries, *first, call);
  std::vector<WantedState> result;
  for (const auto& [key, value] : *first) {
    result.push_back(combine(key.name(), members, entries, call));
  }
  return result;
}

} // namespace

std::vector<WantedLeaf> wanted_leaves(
    const ModelParams& model,
    const StateDict& state,
    std::string_view call) {
  std::vector<WantedLeaf> result;
  for (const ModelParam& param : model.all()) {
    const auto members = model.held_by(param.leaf);
    if (members.front() != &param) {
      continue; // the leaf came with its first member
    }
    if (auto states = states_for(members, state, call)) {
      result.push_back({members, std::move(*states)});
    }
  }
  return result;
}

} // namespace tessera::transfer
