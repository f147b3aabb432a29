#include "transfer/optim_state_keys.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "engine/list_parameters.h"
#include "state/nearest.h"
#include "transfer/optim_dict_form.h"

namespace tessera::transfer {
namespace {

void sort_ids(StateList& params) {
  const bool are_ids =
      std::all_of(params.begin(), params.end(), [](const StateValue& param) {
        return param.is_int();
      });
  if (are_ids) {
    std::sort(
        params.begin(),
        params.end(),
        [](const StateValue& a, const StateValue& b) {
          return a.to_int() < b.to_int();
        });
  }
}

} // namespace

void NumbersAndNames::add(int64_t id, const std::string& name) {
  ids_.emplace(name, id);
  names_.emplace(id, name);
  known_.push_back(name);
}

StateKey NumbersAndNames::change(const StateKey& key, bool to_ids) const {
  if (key.is_id() == to_ids) {
    return key;
  }
  if (to_ids) {
    if (const auto id = ids_.find(key.name()); id != ids_.end()) {
      return id->second;
    }
  } else if (const auto name = names_.find(key.id()); name != names_.end()) {
    return name->second;
  }
  raise<c10::ValueError>(
      {.call = call_},
      fmt::format(
          "the optimizer has no parameter {}.{}",
          key.is_id() ? key.text() : "\"" + key.text() + "\"",
          state::did_you_mean(key.text(), known_)));
}

NumbersAndNames local_names(
    const char* call,
    torch::nn::Module& model,
    const torch::optim::Optimizer& optim) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : engine::list_parameters(model)) {
    names.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  NumbersAndNames result(call);
  int64_t id = 0;
  for (const auto& group : optim.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      const auto name = names.find(tensor.unsafeGetTensorImpl());
      if (name == names.end()) {
        raise<c10::ValueError>(
            {.call = call},
            fmt::format(
                "the optimizer's parameter {} is not of this model. Build the optimizer on tessera::parameters(model).",
                id));
      }
      result.add(id++, name->second);
    }
  }
  return result;
}

StateDict with_keys(
    const StateDict& osd,
    const std::function<StateKey(const StateKey&)>& change) {
  StateDict result = osd;
  StateDict state;
  for (const auto& [key, entry] : osd.at("state").dict()) {
    state.set(change(key), entry);
  }
  result.set("state", std::move(state));
  if (StateValue* groups = result.find("param_groups")) {
    for (StateValue& group : groups->list()) {
      for (StateValue& param : group.dict().at("params").list()) {
        const StateKey key = change(key_of(param));
        param = key.is_id() ? StateValue(key.id()) : StateValue(key.name());
      }
      sort_ids(group.dict().at("params").list());
    }
  }
  return result;
}

} // namespace tessera::transfer
