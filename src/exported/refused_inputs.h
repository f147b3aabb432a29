// What a rank does whose input does not fit.
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace tessera::exported {

/// [Note: refused inputs]
///
/// An input is checked on the rank that has it, before the model does anything.
/// Where the model is not sharded, an input that does not fit is a plain
/// exception. The ranks of a sharded model run each forward together: if one
/// rank threw and went on with its next batch, its peers would wait for it, or
/// the gradients of different batches would be added up.
///
/// So the rank that refuses asks the others, by the store, whether they refuse
/// the same forward. (Nothing is exchanged in a forward that nobody refuses.)
/// If all do, each throws its own error and all may go on: nothing was run. If
/// not, the rank gives the groups of the model up. Its peers throw a
/// PeerLostError with the reason from the collective that they wait in, or from
/// their next.

/// `number` counts the forwards of the model. Adds to `error` what happened to
/// the groups, if they are given up. Nothing unless the model is sharded.
void refuse_together(
    const torch::nn::Module& model,
    int64_t number,
    c10::Error& error);

} // namespace tessera::exported
