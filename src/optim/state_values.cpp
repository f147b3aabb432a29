#include "optim/state_values.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::optim {

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.scalar_type() == b.scalar_type() &&
      a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.const_data_ptr() == b.const_data_ptr();
}

StateValue copy_for(const at::Tensor& param, const StateValue& value) {
  if (value.is_tensor()) {
    const at::Tensor& tensor = value.tensor();
    if (!tensor.defined()) {
      return value;
    }
    const bool casts = tensor.is_floating_point() && param.is_floating_point();
    return tensor.detach().to(
        param.device(),
        casts ? param.scalar_type() : tensor.scalar_type(),
        /*non_blocking=*/false,
        /*copy=*/true);
  }
  if (value.is_list()) {
    StateList copy;
    for (const StateValue& part : value.list()) {
      copy.push_back(copy_for(param, part));
    }
    return copy;
  }
  if (value.is_dict()) {
    StateDict copy;
    for (const auto& [key, part] : value.dict()) {
      copy.set(key, copy_for(param, part));
    }
    return copy;
  }
  return value;
}

void check_like_param(
    const at::Tensor& param,
    const std::string& state_name,
    const StateValue& value,
    const ErrorSite& site) {
  if (!value.is_tensor()) {
    raise<c10::TypeError>(
        site,
        fmt::format(
            "state \"{}\" is of kind {}, must be a tensor.",
            state_name,
            value.kind()));
  }
  if (value.tensor().sizes() != param.sizes()) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "state \"{}\" has shape {}, the parameter {}. Is the order of the parameters the same as when it was saved?",
            state_name,
            value.tensor().sizes().vec(),
            param.sizes().vec()));
  }
}

double scalar_of(
    const std::string& state_name,
    const StateValue& value,
    const ErrorSite& site) {
  if (value.is_int() || value.is_double()) {
    return value.to_double();
  }
  if (!value.is_tensor() || value.tensor().numel() != 1) {
    raise<c10::TypeError>(
        site,
        fmt::format(
            "state \"{}\" must be a number or a tensor with one element, it is {}.",
            state_name,
            value.is_tensor()
                ? fmt::format(
                      "a tensor of shape {}", value.tensor().sizes().vec())
                : value.kind()));
  }
  return value.tensor().item<double>();
}

} // namespace tessera::optim
