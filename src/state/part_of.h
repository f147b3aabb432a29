// Which tensors are parts of sharded ones.
#pragma once

#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace tessera::state {

/// What `tensor`, a leaf of a unit's, is a part of; nothing if it is no leaf,
/// or if this rank has it all. `parameter` is how messages call it.
std::optional<PartOf> find_part_of(
    const at::Tensor& tensor,
    const std::string& parameter);

/// The same for a value of a dictionary: it may know it itself.
std::optional<PartOf> find_part_of(
    const StateValue& value,
    const std::string& parameter);

/// "rank 1's part of parameter "w", which unit "fc" shards over 2 ranks".
std::string to_string(const PartOf& part);

/// `value`, state of a leaf, with the note that its tensors are parts. Those
/// without dims are left as they are: a count of steps is no part.
StateValue marked_as_part(const StateValue& value, const PartOf& origin);

} // namespace tessera::state
