// The gradients that clip_grad_norm_ scales.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::fsdp {

/// The gradients of one group's shards.
struct GroupGradients {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// A parameter that every rank has whole.
struct PlainGradient {
  std::string name;
  at::Tensor gradient; // may be undefined
};

struct ClippedGradients {
  /// In the order in which the module's units name the groups, which is the
  /// same on all ranks.
  std::vector<GroupGradients> sharded;
  std::vector<PlainGradient> plain;
  /// All ranks of the first unit; no group if nothing is sharded.
  Group all;
  /// Where norms are put together: a device where a parameter is on one, else
  /// the CPU. It is the same kind on all ranks, also on one that has no
  /// gradient.
  at::Device device{at::kCPU};

  /// The gradients that are there, of all kinds.
  std::vector<at::Tensor> defined() const;
};

ClippedGradients gradients_of(torch::nn::Module& module);

/// Throws DisagreementError on all ranks unless they have the same gradients of
/// plain parameters, as far as norms tell. `powers` has a row for each rank and
/// a column for each parameter: the norm to the power of `p`, or the norm
/// itself where `p` is infinite; -1 where there is no gradient.
void refuse_differing(
    const std::vector<PlainGradient>& plain,
    const Group& group,
    const double* powers,
    double p);

} // namespace tessera::fsdp
