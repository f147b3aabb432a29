// Finds out which tensors are parts of sharded parameters.
#pragma once

#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace tessera::state {

/// What `tensor`, a unit's leaf, is a part of; nothing if it is not a unit's
/// leaf, or if this rank has all of it. `parameter` is its name in messages.
std::optional<PartOf> find_part_of(
    const at::Tensor& tensor,
    const std::string& parameter);

/// The same for a value of a dictionary, which may carry the information
/// itself.
std::optional<PartOf> find_part_of(
    const StateValue& value,
    const std::string& parameter);

/// "rank 1's part of parameter "w", which unit "fc" shards over 2 ranks".
std::string to_string(const PartOf& part);

/// `value`, the state of a leaf, with its tensors marked as parts. Tensors
/// without dims are left as they are: a count of steps is not a part.
StateValue marked_as_part(const StateValue& value, const PartOf& origin);

} // namespace tessera::state
