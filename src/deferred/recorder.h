// Sees the operators of a thread that constructs a model, and records those on
// deferred tensors.
#pragma once

#include <memory>

#include "deferred/tape.h"

namespace tessera::engine {

/// Registers the fallback of kDeferredKey, once a process. See
/// [Note: deferred tensors].
void enable_recording();

/// Where guards on this thread record. They share a tape as long as any of its
/// tensors lives, so that a model can be built in several steps.
std::shared_ptr<Tape> current_tape();

} // namespace tessera::engine
