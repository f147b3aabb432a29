// State under names and in sharded tensors, for an optimizer that steps shards.
#pragma once

#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::optim {

/// Throws c10::ValueError if `param` is a shard of a parameter of another name.
/// Names of other tensors are not checked. `where` is "param group 1".
void check_name(
    const std::string& name,
    const at::Tensor& param,
    const std::string& where,
    const ErrorSite& site);

/// A parameter's state with this rank's part in place of each sharded tensor.
/// If the part is one piece, the result shares its memory. Throws
/// c10::TypeError if `param` is not a shard or if the sharded tensor is not a
/// value of its own in `values`, c10::ValueError if the sharded tensor is cut
/// in another way than `param` is.
StateDict local_state(
    const at::Tensor& param,
    const StateDict& values,
    const ErrorSite& site);

/// True for sharded state of a parameter of which this rank has nothing. No
/// optimizer keeps state for such parameters.
bool is_empty_part(const at::Tensor& param, const StateDict& values);

} // namespace tessera::optim
