// What a rank does whose input does not fit.
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

namespace tessera::exported {

/// [Note: refused inputs]
///
/// An input is checked on the rank that has it, before the model does anything.
/// Where ranks do not wait for one another, an input that does not fit is a
/// plain exception. The ranks of a sharded model run each forward together, and
/// those of a DistributedDataParallel each forward that is followed by a
/// reduction: if one rank threw and went on with its next batch, its peers
/// would wait for it, or the gradients of different batches would be added up.
///
/// So the rank that refuses asks the others, by the store, whether they refuse
/// the same forward. (Nothing is exchanged in a forward that nobody refuses.)
/// If all do, each throws its own error and all may go on: nothing was run. If
/// not, the rank gives the groups of the model up. Its peers throw a
/// PeerLostError with the reason from the collective that they wait in, or from
/// their next.
///
/// A forward of copies that does not learn, in evaluation or without gradients,
/// or one under no_sync(), concerns the rank that runs it. Ranks may run
/// different numbers of those, so such forwards are not counted where the ranks
/// compare which forward they refuse.

/// Which forward of a model it is, refused ones included.
struct ForwardNumber {
  int64_t among_all = 0;
  /// Among those in training mode and with gradients; nothing for the others.
  std::optional<int64_t> among_learning = std::nullopt;
};

/// Adds to `error` what happened to the groups, if they are given up. Nothing
/// unless the model is sharded, or in a DistributedDataParallel and learning.
void refuse_together(
    const torch::nn::Module& model,
    const ForwardNumber& number,
    c10::Error& error);

} // namespace tessera::exported
