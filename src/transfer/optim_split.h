// One dictionary for several optimizers, or for a part of a model.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/optim_tensors.h"

namespace tessera::transfer {

using Names = std::vector<std::string>;

/// Names below some submodules, and without their prefixes if asked for.
class Selection {
 public:
  /// Throws c10::ValueError for a submodule that is not in the model.
  Selection(
      std::string_view call,
      torch::nn::Module& model,
      const ModuleRefs& submodules,
      bool keep_prefixes);

  /// The name to use, or nothing if it is not wanted.
  std::optional<std::string> rename(const std::string& name) const;

 private:
  bool keep_prefixes_;
  bool takes_all_;
  Names prefixes_;
};

/// Adds `value`; throws c10::ValueError if there is one of that name, which
/// only names without prefixes can do.
void set_once(
    std::string_view call,
    StateDict& dict,
    const std::string& name,
    StateValue value);

/// Adds `from`, of another optimizer, to `to`.
void merge_osd(StateDict& to, StateDict from);

/// What is selected of an OSD with names.
StateDict select_osd(
    std::string_view call,
    const StateDict& osd,
    const Selection& selection);

/// A trainable or frozen parameter of an optimizer.
struct OptimName {
  std::string name;
  bool is_trainable = true;
};
/// Those of each optimizer's groups.
using OptimNames = std::vector<std::vector<std::vector<OptimName>>>;
std::vector<std::vector<OptimName>> names_of(const OptimTensors& tensors);

/// On one level: "state.fc.weight.exp_avg", "param_groups.fc.weight.lr". Values
/// of a group are written once for each of its parameters, as Python has it:
/// then a dictionary says nothing of groups, and fits others.
StateDict flatten_osd(const StateDict& osd);
/// Back, with one group for each of the optimizers'. Keys that belong to no
/// parameter go to `unexpected`. Throws c10::ValueError if parameters of one
/// group have different values.
StateDict unflatten_osd(
    std::string_view call,
    const StateDict& flat,
    const OptimNames& optimizers,
    Names& unexpected);

/// Each optimizer's part of a dictionary, with one group for each of its own;
/// groups are recognized by their parameters. Throws c10::ValueError for what
/// does not fit, all of it in one text. Without `strict`, state of no
/// optimizer's parameter is ignored, and a trainable parameter may have none.
std::vector<StateDict> split_osd(
    std::string_view call,
    const StateDict& osd,
    const ModelParams& params,
    const OptimNames& optimizers,
    bool strict,
    Names unexpected = {});

} // namespace tessera::transfer
