// The operations on deferred tensors that sharding needs.
#pragma once

#include <tessera/deferred/deferred_init.h>

#include <optional>

#include "deferred/tape.h"

namespace tessera::deferred {

/// A new tensor with the values that `deferred` stands for, by repeating only
/// the operators that it depends on. Memory peaks at this tensor and what it is
/// computed from. `deferred` stays as it is: the caller may keep a slice and
/// drop the rest. The result has no gradient history and is on the intended
/// device; the random generators are unchanged afterwards.
at::Tensor replay(const at::Tensor& deferred);

/// Elements [begin, begin + numel) of what `deferred` stands for, flattened,
/// without making the others. Nothing if that cannot be done: use replay()
/// then.
std::optional<ReplayedPart> replay_part(
    const at::Tensor& deferred,
    int64_t begin,
    int64_t numel);

/// The device that `deferred` will have.
at::Device intended_device(const at::Tensor& deferred);

} // namespace tessera::deferred
