// What sharding does with deferred tensors.
#pragma once

#include <tessera/deferred/deferred_init.h>

namespace tessera::engine {

/// A new tensor with the values that `deferred` stands for, by repeating the
/// operators that it depends on, and these only. The peak of memory is this
/// tensor and what it is computed from. `deferred` stays as it is: whoever
/// keeps a slice drops the rest. Without gradient history, on the intended
/// device; the random generators are as before afterwards.
at::Tensor replay(const at::Tensor& deferred);

/// The device that `deferred` will have.
at::Device intended_device(const at::Tensor& deferred);

} // namespace tessera::engine
