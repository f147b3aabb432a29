#include "transfer/optim_group_ids.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <set>

#include "state/nearest.h"

namespace tessera::transfer {
namespace {

StateList ids_of(
    const StateList& names,
    const ModelParams& model,
    const OptimTensors& tensors,
    std::string_view call) {
  const auto refuse = [&](const std::string& what) {
    raise<c10::ValueError>({.call = call}, what);
  };
  std::set<int64_t> ids;
  for (const StateValue& name : names) {
    if (!name.is_string()) {
      refuse(
          "param_groups: \"params\" has numbers, expected names of the model's parameters. rekey_optim_state_dict() changes them.");
    }
    const ModelParam* param = model.find(name.string());
    const OptimTensor* holder =
        param == nullptr ? nullptr : tensors.holder_of(*param);
    if (holder == nullptr) {
      refuse(fmt::format(
          "param_groups: \"{}\" is not a parameter of the {}.{}",
          name.string(),
          param == nullptr ? "model" : "optimizer",
          param == nullptr ? state::did_you_mean(name.string(), model.names())
                           : ""));
    }
    ids.insert(holder->id);
  }
  StateList result;
  for (const int64_t id : ids) {
    result.emplace_back(id);
  }
  return result;
}

} // namespace

StateList with_ids(
    const StateList& groups,
    const ModelParams& model,
    const OptimTensors& tensors,
    std::string_view call) {
  StateList result;
  for (const StateValue& group : groups) {
    StateDict copy = group.dict().clone();
    copy.set(
        "params",
        ids_of(group.dict().at("params").list(), model, tensors, call));
    result.emplace_back(std::move(copy));
  }
  return result;
}

} // namespace tessera::transfer
