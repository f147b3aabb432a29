#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Everything that a training run needs to resume: model, optimizers, the
/// random number generators of every rank, values of the user's own, and
/// whatever else has a state, such as a data loader.
///
///   TrainingState training(model, {optimizer});
///   training.add("data", loader);
///   training.values = {{"step", 0}, {"tokens_seen", 0}};
///   checkpoint::load(training, "runs/7/last");
///   int64_t step = training.values.at("step").to_int();
///
/// Works for plain, data-parallel and sharded models on any number of ranks;
/// the checkpoint has "model" and "optim" as Python's get_state_dict() names
/// them, "rng", "values" and the names of the added parts.
///
/// The generators are the CPU's and that of the GPU the model is on (if it is
/// on none, of the current one). A rank restores the generators that the rank
/// of the same number had, if there was one; other ranks keep their own. (With
/// the same number of ranks a run resumes bit by bit; with another number,
/// ranks draw other numbers in any case.)
class TESSERA_API TrainingState : public checkpoint::Stateful {
 public:
  /// Both must outlive this object.
  TrainingState(ModuleRef model, OptimizerRefs optimizers);

  /// Saved with the rest; loading replaces them. Before loading, set the same
  /// keys that were saved: a key that only one side has is an error. Values
  /// must be the same on all ranks, unless the rank is in the name.
  StateDict values;

  /// Saves and loads `part`, which must outlive this object, under `name`
  /// ("data", "scheduler", "scaler"). A checkpoint without the part is refused
  /// by load(), with the names that are missing, and so is a checkpoint with a
  /// part that was not added, unless LoadOptions::optional passes its names.
  /// All ranks add the same parts in the same order, before they save or load.
  /// Throws c10::ValueError, and adds nothing, for a name that is empty, has a
  /// dot or is taken: by another part, or "model", "optim", "rng", "values".
  /// Not collective.
  void add(std::string name, checkpoint::Stateful& part);

  StateDict state_dict() override;
  void load_state_dict(const StateDict& state) override;
  /// Asks the added parts.
  void check_state_dict(const StateDict& state) const override;
  bool is_optional(const std::string& name) const override;

 private:
  torch::nn::Module& model_;
  OptimizerRefs optimizers_;
  std::vector<std::pair<std::string, checkpoint::Stateful*>> parts_;
};

} // namespace tessera
