#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/nn/module.h>

#include <string>

namespace tessera {

/// All that a training run needs to go on: model, optimizers, the random number
/// generators of every rank, and values of the user's own.
///
///   TrainingState training(model, {optimizer});
///   training.values = {{"step", 0}, {"tokens_seen", 0}};
///   checkpoint::load(training, "runs/7/last");
///   int64_t step = training.values.at("step").to_int();
///
/// Works for plain, data-parallel and sharded models on any number of ranks;
/// the checkpoint has "model" and "optim" as Python's get_state_dict() names
/// them, "rng" and "values".
///
/// The generators are the CPU's and that of the GPU the model is on (if it is
/// on none, of the current one). A rank takes up those that the rank of its
/// number had, as far as there were so many; the others keep their own. (The
/// same number of ranks goes on bit by bit; another one draws other numbers in
/// any case.)
class TESSERA_API TrainingState : public checkpoint::Stateful {
 public:
  /// Both must outlive it.
  TrainingState(ModuleRef model, OptimizerRefs optimizers);

  /// Saved with the rest; loading replaces them. Set the same keys before
  /// loading as were saved: those that only one side has are an error. The same
  /// on all ranks, unless the rank is in the name.
  StateDict values;

  StateDict state_dict() override;
  void load_state_dict(const StateDict& state) override;
  bool is_optional(const std::string& name) const override;

 private:
  torch::nn::Module& model_;
  OptimizerRefs optimizers_;
};

} // namespace tessera
