// The values of a parameter's state, as dictionaries have them.
#pragma once

#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::optim {

/// Whether both tensors show the same elements of the same memory. Either may
/// be undefined.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b);

/// Copies state that no class knows: tensors go to the parameter's device,
/// floating-point ones in its dtype.
StateValue copy_for(const at::Tensor& param, const StateValue& value);

/// Throws unless `value` is a tensor of the parameter's shape.
void check_like_param(
    const at::Tensor& param,
    const std::string& state_name,
    const StateValue& value,
    const ErrorSite& site);

/// A number, or a tensor with one element. Throws c10::TypeError.
double scalar_of(
    const std::string& state_name,
    const StateValue& value,
    const ErrorSite& site);

} // namespace tessera::optim
