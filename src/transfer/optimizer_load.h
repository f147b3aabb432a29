// A state dict on its way into optimizers.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/nn/module.h>

#include <vector>

#include "transfer/load_together.h"
#include "transfer/model_params.h"
#include "transfer/optim_names.h"

namespace tessera::transfer {

/// Loads in two steps, so that all checks come before the first change.
class OptimizerLoad {
 public:
  /// Finds what each optimizer gets. Throws on all ranks if the dictionary does
  /// not fit. `optimizers` must outlive the load. Collective.
  OptimizerLoad(
      const char* call,
      torch::nn::Module& model,
      const OptimizerRefs& optimizers,
      const StateDict& dict,
      const StateDictOptions& options);

  /// Loads. Collective.
  void apply();
  /// After apply(): gives the optimizers their earlier state back.
  void undo();

 private:
  std::vector<StateDict> split(
      const StateDict& dict,
      const ModelParams& params,
      const OptimNames& names,
      const StateDictOptions& options) const;

  const char* call_;
  const OptimizerRefs& optimizers_;
  std::vector<Group> groups_;
  std::vector<StateDict> to_load_; // by optimizer
  Snapshots before_;
};

} // namespace tessera::transfer
