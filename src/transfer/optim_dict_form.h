// The form of an optimizer's state dict, and of the values in it.
#pragma once

#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::transfer {

/// True for a value that is cut and joined as its parameter is. `like`: the
/// shape that such a value has. If `like` has no dimensions, nothing but the
/// name tells such a value from a count of steps.
bool is_elementwise(
    std::string_view name,
    const StateValue& value,
    at::IntArrayRef like);

/// Throws c10::ValueError unless `osd` has the form of an optimizer's state
/// dict: "state" with a dict for each key, and, if there are any,
/// "param_groups" with their "params".
void check_form(const StateDict& osd, std::string_view call);

/// Throws c10::ValueError if "state" has a number as a key.
void check_keys_are_names(const StateDict& osd, std::string_view call);

/// An element of "params" as a key of "state".
StateKey key_of(const StateValue& param);

/// Shape and dtype of a tensor that this rank may not have.
struct TensorLike {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

/// The shape and dtype of a value with elements of its own: nothing for plain
/// values and for scalars. `shape`: the parameter's.
std::optional<TensorLike> tensor_like(
    const std::string& name,
    const StateValue& value,
    at::IntArrayRef shape);

} // namespace tessera::transfer
