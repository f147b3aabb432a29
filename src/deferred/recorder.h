// Sees the operators of a thread that constructs a model, and records those on
// deferred tensors.
#pragma once

#include <memory>

#include "deferred/tape.h"

namespace tessera::deferred {

/// Registers the fallback of kDeferredKey, once per process. See
/// [Note: deferred tensors].
void enable_recording();

/// The tape on which guards of this thread record. Guards share a tape as long
/// as any of its tensors lives, so that a model can be built in several steps.
std::shared_ptr<Tape> current_tape();

} // namespace tessera::deferred
