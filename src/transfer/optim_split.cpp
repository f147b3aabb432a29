#include "transfer/optim_split.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "engine/names.h"
#include "transfer/optim_transfer.h"
#include "transfer/write_model_state.h"

namespace tessera::transfer {

Selection::Selection(
    std::string_view call,
    torch::nn::Module& model,
    const ModuleRefs& submodules,
    bool keep_prefixes)
    : keep_prefixes_(keep_prefixes), takes_all_(submodules.empty()) {
  for (torch::nn::Module& submodule : submodules) {
    std::optional<std::string> found;
    if (&submodule == &model) {
      found = "";
    } else {
      for (const auto& item : model.named_modules("", false)) {
        if (item.value().get() == &submodule) {
          found = engine::clean_name(item.key()) + ".";
        }
      }
    }
    if (!found) {
      raise<c10::ValueError>(
          {.call = call},
          fmt::format(
              "a submodule of the class {} is not in the model.",
              submodule.name()));
    }
    prefixes_.push_back(*found);
  }
}

std::optional<std::string> Selection::rename(const std::string& name) const {
  if (takes_all_) {
    return name;
  }
  for (const std::string& prefix : prefixes_) {
    if (name.starts_with(prefix)) {
      return keep_prefixes_ ? name : name.substr(prefix.size());
    }
  }
  return std::nullopt;
}

void set_once(
    std::string_view call,
    StateDict& dict,
    const std::string& name,
    StateValue value) {
  if (dict.contains(name)) {
    raise<c10::ValueError>(
        {.call = call, .parameter = name},
        "two submodules have it. Keep their prefixes, or take one at a time.");
  }
  dict.set(name, std::move(value));
}

void merge_osd(StateDict& to, StateDict from) {
  if (from.empty()) {
    return; // on other ranks than 0
  }
  if (to.empty()) {
    to = std::move(from);
    return;
  }
  for (const auto& [key, entry] : from.at("state").dict()) {
    to.at("state").dict().set(key, entry);
  }
  for (const StateValue& group : from.at("param_groups").list()) {
    to.at("param_groups").list().push_back(group);
  }
}

StateDict select_osd(
    std::string_view call,
    const StateDict& osd,
    const Selection& selection) {
  if (osd.empty()) {
    return osd;
  }
  StateDict state;
  for (const auto& [key, entry] : osd.at("state").dict()) {
    if (const auto name = selection.rename(key.name())) {
      set_once(call, state, *name, entry);
    }
  }
  StateList groups;
  for (const StateValue& group : osd.at("param_groups").list()) {
    StateDict copy = group.dict();
    StateList names;
    for (const StateValue& param : group.dict().at("params").list()) {
      if (const auto name = selection.rename(param.string())) {
        names.emplace_back(*name);
      }
    }
    if (!names.empty()) {
      copy.set("params", std::move(names));
      groups.emplace_back(std::move(copy));
    }
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

std::vector<std::vector<OptimName>> names_of(const OptimTensors& tensors) {
  std::vector<std::vector<OptimName>> result;
  for (const auto& group : tensors.groups()) {
    result.emplace_back();
    for (const OptimTensor& one : group) {
      for (const ModelParam* member : one.members) {
        result.back().push_back({member->name, member->leaf.requires_grad()});
      }
    }
  }
  return result;
}

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

namespace {

/// What a flat dictionary has for each parameter.
struct Unflattened {
  std::unordered_map<std::string, StateDict> state;
  std::unordered_map<std::string, StateDict> options;
  Names unexpected;
};

/// Names and keys may both have dots: the longest name counts.
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

StateDict unflatten_osd(
    std::string_view call,
    const StateDict& flat,
    const OptimNames& optimizers,
    Names& unexpected) {
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
          continue; // missing: split_osd() says so
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

namespace {

class Splitter {
 public:
  Splitter(
      std::string_view call,
      const StateDict& osd,
      const ModelParams& params,
      const OptimNames& optimizers)
      : call_(call), osd_(osd), params_(params), optimizers_(optimizers) {}

  std::vector<StateDict> split(bool strict, Names unexpected) {
    check_keys();
    find_groups();
    keys_.unexpected = std::move(unexpected);
    std::vector<StateDict> parts;
    for (const auto& groups : optimizers_) {
      parts.push_back(part_for(groups, strict));
    }
    find_unexpected();
    if (!strict) { // a parameter in no group has no options to take
      keys_.unexpected.clear();
    }
    Names expected;
    for (const std::string& name : params_.names()) {
      expected.push_back("state." + name);
    }
    refuse_incompatible(call_, keys_, expected);
    return parts;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    raise<c10::ValueError>({.call = call_}, what);
  }

  void check_keys() const {
    if (!osd_.contains("param_groups")) {
      refuse(
          "the state dict has no \"param_groups\"; expected what get_optimizer_state_dict returns.");
    }
    check_form(osd_, call_);
    for (const auto& [key, value] : osd_) {
      if (key != StateKey("state") && key != StateKey("param_groups")) {
        refuse(fmt::format(
            "the state dict has an unknown key \"{}\".", key.text()));
      }
    }
    for (const auto& [key, entry] : osd_.at("state").dict()) {
      if (key.is_id()) {
        refuse(fmt::format(
            "the state dict has the number {} as a key, expected names of the model's parameters.",
            key.id()));
      }
    }
  }

  void find_groups() {
    const StateList& groups = osd_.at("param_groups").list();
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const StateValue& param : groups[g].dict().at("params").list()) {
        if (!param.is_string()) {
          refuse(fmt::format(
              "param_groups.{}.params has the number {}, expected names of the model's parameters.",
              g,
              param.to_int()));
        }
        if (!group_of_.emplace(param.string(), g).second) {
          refuse(fmt::format(
              "param_groups: \"{}\" is in two groups.", param.string()));
        }
      }
    }
  }

  StateDict part_for(
      const std::vector<std::vector<OptimName>>& groups,
      bool strict) {
    StateDict state;
    StateList kept;
    Names without;
    for (const auto& names : groups) {
      kept.emplace_back(group_for(names));
      for (const OptimName& one : names) {
        taken_.insert(one.name);
        if (const StateValue* entry = osd_.at("state").dict().find(one.name)) {
          state.set(one.name, *entry);
        } else if (one.is_trainable) {
          without.push_back("state." + one.name);
        }
      }
    }
    if (strict && !state.empty()) { // else it is one that keeps none
      keys_.missing.insert(keys_.missing.end(), without.begin(), without.end());
    }
    return {{"state", std::move(state)}, {"param_groups", std::move(kept)}};
  }

  StateDict group_for(const std::vector<OptimName>& names) {
    std::optional<size_t> group;
    StateList params;
    for (const OptimName& one : names) {
      params.emplace_back(one.name);
      const auto found = group_of_.find(one.name);
      if (found == group_of_.end()) {
        keys_.missing.push_back("param_groups." + one.name);
        continue;
      }
      if (group && *group != found->second) {
        refuse(fmt::format(
            "param_groups: \"{}\" and \"{}\" are in one group of the optimizer, but in groups {} and {} of the state dict.",
            names.front().name,
            one.name,
            *group,
            found->second));
      }
      group = found->second;
    }
    StateDict result =
        group ? osd_.at("param_groups").list()[*group].dict() : StateDict();
    result.set("params", std::move(params));
    return result;
  }

  void find_unexpected() {
    for (const auto& [key, entry] : osd_.at("state").dict()) {
      if (!taken_.contains(key.name())) {
        keys_.unexpected.push_back("state." + key.name());
      }
    }
    for (const StateValue& group : osd_.at("param_groups").list()) {
      for (const StateValue& param : group.dict().at("params").list()) {
        if (!taken_.contains(param.string())) {
          keys_.unexpected.push_back("param_groups." + param.string());
        }
      }
    }
  }

  const std::string_view call_;
  const StateDict& osd_;
  const ModelParams& params_;
  const OptimNames& optimizers_;
  std::unordered_map<std::string, size_t> group_of_;
  std::unordered_set<std::string> taken_;
  IncompatibleKeys keys_;
};

} // namespace

std::vector<StateDict> split_osd(
    std::string_view call,
    const StateDict& osd,
    const ModelParams& params,
    const OptimNames& optimizers,
    bool strict,
    Names unexpected) {
  return Splitter(call, osd, params, optimizers)
      .split(strict, std::move(unexpected));
}

} // namespace tessera::transfer
