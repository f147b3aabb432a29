#include "transfer/split_optim_state.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "transfer/incompatible_keys.h"
#include "transfer/optim_dict_form.h"

namespace tessera::transfer {
namespace {

using Names = std::vector<std::string>;

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

  StateDict part_for(const OptimGroupNames& groups, bool strict) {
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
    if (strict && !state.empty()) { // an optimizer may keep no state
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

void merge_osd(StateDict& to, StateDict from) {
  if (from.empty()) {
    return; // on ranks other than 0
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

std::vector<StateDict> split_osd(
    std::string_view call,
    const StateDict& osd,
    const ModelParams& params,
    const OptimNames& optimizers,
    bool strict,
    std::vector<std::string> unexpected) {
  return Splitter(call, osd, params, optimizers)
      .split(strict, std::move(unexpected));
}

} // namespace tessera::transfer
