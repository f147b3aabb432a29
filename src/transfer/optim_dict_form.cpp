#include "transfer/optim_dict_form.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

namespace tessera::transfer {

bool is_elementwise(
    std::string_view name,
    const StateValue& value,
    at::IntArrayRef like) {
  return value.is_tensor() && value.tensor().defined() &&
      value.tensor().sizes() == like && (!like.empty() || name != "step");
}

void check_form(const StateDict& osd, std::string_view call) {
  const auto refuse = [&](const std::string& what) {
    raise<c10::ValueError>({.call = call}, what);
  };
  const StateValue* state = osd.find("state");
  if (state == nullptr || !state->is_dict()) {
    refuse(
        "`optim_state_dict` must have the keys \"state\" and, unless it was taken out, \"param_groups\".");
  }
  for (const auto& [key, entry] : state->dict()) {
    if (!entry.is_dict()) {
      refuse(fmt::format(
          "state.{} is a {}, expected a dict.", key.text(), entry.kind()));
    }
    for (const auto& [name, value] : entry.dict()) {
      if (name.is_id()) {
        refuse(fmt::format(
            "state.{} has the number {} as a key, expected names of its values.",
            key.text(),
            name.id()));
      }
    }
  }
  const StateValue* groups = osd.find("param_groups");
  if (groups == nullptr) {
    return;
  }
  if (!groups->is_list()) {
    refuse(fmt::format(
        "param_groups is a {}, expected a list of dicts.", groups->kind()));
  }
  for (size_t g = 0; g < groups->list().size(); ++g) {
    const StateValue& group = groups->list()[g];
    const StateValue* params =
        group.is_dict() ? group.dict().find("params") : nullptr;
    if (params == nullptr || !params->is_list()) {
      refuse(fmt::format(
          "param_groups.{} is not a dict with a list of \"params\".", g));
    }
    for (const StateValue& param : params->list()) {
      if (!param.is_int() && !param.is_string()) {
        refuse(fmt::format(
            "param_groups.{}.params has a {}, expected numbers or names.",
            g,
            param.kind()));
      }
    }
  }
}

void check_keys_are_names(const StateDict& osd, std::string_view call) {
  for (const auto& [key, entry] : osd.at("state").dict()) {
    if (key.is_id()) {
      raise<c10::ValueError>(
          {.call = call},
          fmt::format(
              "`optim_state_dict` has the number {} as a key, expected names of the model's parameters. rekey_optim_state_dict() changes them.",
              key.id()));
    }
  }
}

StateKey key_of(const StateValue& param) {
  return param.is_int() ? StateKey(param.to_int()) : StateKey(param.string());
}

std::optional<TensorLike> tensor_like(
    const std::string& name,
    const StateValue& value,
    at::IntArrayRef shape) {
  if (value.is_sharded()) {
    return TensorLike{value.sharded().sizes(), value.sharded().dtype()};
  }
  if (value.is_tensor() && value.tensor().defined() &&
      (value.tensor().dim() > 0 || is_elementwise(name, value, shape))) {
    return TensorLike{
        value.tensor().sizes().vec(), value.tensor().scalar_type()};
  }
  return std::nullopt;
}

} // namespace tessera::transfer
