#include "transfer/flat_optim_dict.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <unordered_map>
#include <unordered_set>

namespace tessera::transfer {
namespace {

/// The entries of a flat dictionary, by parameter.
struct Unflattened {
  std::unordered_map<std::string, StateDict> state;
  std::unordered_map<std::string, StateDict> options;
  std::vector<std::string> unexpected;
};

/// Names and keys may both contain dots: the longest known name counts.
Unflattened sort_out(
    const StateDict& flat,
    const std::unordered_set<std::string>& names) {
  Unflattened result;
  for (const auto& [key, value] : flat) {
    const std::string text = key.text();
    const size_t first = text.find('.');
    const std::string head = text.substr(0, first);
    auto* into = head == "state" ? &result.state
        : head == "param_groups" ? &result.options
                                 : nullptr;
    bool is_known = false;
    for (size_t dot = text.rfind('.');
         into != nullptr && dot != std::string::npos && dot > first;
         dot = text.rfind('.', dot - 1)) {
      const std::string name = text.substr(first + 1, dot - first - 1);
      if (names.contains(name)) {
        (*into)[name].set(text.substr(dot + 1), value);
        is_known = true;
        break;
      }
    }
    if (!is_known) {
      result.unexpected.push_back(text);
    }
  }
  return result;
}

} // namespace

StateDict flatten_osd(const StateDict& osd) {
  StateDict flat;
  if (osd.empty()) {
    return flat;
  }
  for (const auto& [key, entry] : osd.at("state").dict()) {
    for (const auto& [name, value] : entry.dict()) {
      flat.set("state." + key.name() + "." + name.name(), value);
    }
  }
  for (const StateValue& group : osd.at("param_groups").list()) {
    for (const StateValue& param : group.dict().at("params").list()) {
      for (const auto& [key, value] : group.dict()) {
        if (key != StateKey("params")) {
          flat.set("param_groups." + param.string() + "." + key.name(), value);
        }
      }
    }
  }
  return flat;
}

StateDict unflatten_osd(
    std::string_view call,
    const StateDict& flat,
    const OptimNames& optimizers,
    std::vector<std::string>& unexpected) {
  std::unordered_set<std::string> known;
  for (const auto& groups : optimizers) {
    for (const auto& names : groups) {
      for (const OptimName& one : names) {
        known.insert(one.name);
      }
    }
  }
  Unflattened found = sort_out(flat, known);
  unexpected = std::move(found.unexpected);
  StateDict state;
  StateList groups;
  for (const auto& optimizer : optimizers) {
    for (const auto& names : optimizer) {
      StateDict group;
      StateList params;
      for (const OptimName& one : names) {
        if (const auto entry = found.state.find(one.name);
            entry != found.state.end()) {
          state.set(one.name, std::move(entry->second));
        }
        const auto options = found.options.find(one.name);
        if (options == found.options.end()) {
          continue; // split_osd() reports missing names
        }
        if (!params.empty() && options->second != group) {
          raise<c10::ValueError>(
              {.call = call, .parameter = one.name},
              fmt::format(
                  "its param_groups values differ from those of \"{}\", which is in the same group of the optimizer:\n{}",
                  params.front().string(),
                  diff_state_dicts(group, options->second)));
        }
        group = options->second;
        params.emplace_back(one.name);
      }
      group.set("params", std::move(params));
      groups.emplace_back(std::move(group));
    }
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

} // namespace tessera::transfer
