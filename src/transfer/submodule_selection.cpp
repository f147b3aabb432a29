#include "transfer/submodule_selection.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "engine/names.h"

namespace tessera::transfer {

SubmoduleSelection::SubmoduleSelection(
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

std::optional<std::string> SubmoduleSelection::rename(
    const std::string& name) const {
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

StateDict select_osd(
    std::string_view call,
    const StateDict& osd,
    const SubmoduleSelection& selection) {
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

} // namespace tessera::transfer
