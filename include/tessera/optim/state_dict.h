#pragma once

#include <tessera/api.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>

namespace tessera::optim {

/// Which ranks get state that other ranks keep.
enum class Collect {
  /// State stays where it is: tensors become sharded tensors, of which each
  /// rank has what it keeps.
  Nobody,
  Rank0, // the others get an empty dictionary
  Everybody,
};

/// An optimizer that knows its own dictionary. The functions below ask it.
class TESSERA_API StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;
  /// Implement the functions of the same names below for this optimizer.
  virtual StateDict state_dict() const = 0;
  virtual void load_state_dict(const StateDict& dict) = 0;
  virtual void initialize_state() = 0;

  /// False if state_dict() would have no state.
  virtual bool has_state() const;
  /// state_dict() including the state that other ranks keep. Collective over
  /// the ranks that share the state; if no ranks share it, the same as
  /// state_dict().
  virtual StateDict collect_state_dict(Collect to);
  /// False for a parameter whose state another rank keeps. The state that
  /// load_state_dict() is given for such a parameter need not have values: a
  /// tensor on the meta device is enough. Not collective.
  virtual bool keeps_state_of(const at::Tensor& param) const;
  /// Returns a function that restores the current state and options. Not
  /// collective.
  virtual std::function<void()> snapshot();
};

/// The state of any optimizer, in the form and with the names of Python's:
///
///   {"state": {0: {"step": .., "exp_avg": ..}, ..},
///    "param_groups": [{"lr": 0.001, .., "params": [0, 1, ..]}, ..]}
///
/// Parameters are numbered through all groups; one without state has no entry.
/// A NamedOptimizer has names instead of numbers. Tensors share memory with the
/// optimizer's, as in Python: clone() what the next step must not change.
/// Shards give this rank's part, which checkpoint::save() refuses: save
/// get_optimizer_state_dict(). Not collective.
///
/// Takes tessera::optim's classes, those derived from them, NamedOptimizer, and
/// torch::optim's SGD, Adam, AdamW, Adagrad, RMSprop and LBFGS (not on shards).
/// Throws c10::TypeError for others.
TESSERA_API StateDict state_dict(const torch::optim::Optimizer& optimizer);

/// Gives the optimizer the state and the hyper-parameters in `dict`. Everything
/// is checked first: it is loaded completely or, with an error that names what
/// does not fit, not at all. Nothing in `dict` is dropped.
///
/// Keys of `dict` stand for places: the first parameter of `dict`'s first group
/// is this optimizer's first, as in Python, whether keys are numbers or names.
/// For a NamedOptimizer names stand for themselves. Names of shards are known:
/// a name at another parameter's place is an error.
///
/// A shard takes a sharded tensor whose pieces on this rank are the shard's
/// own, so that what get_optimizer_state_dict() returned and checkpoint::load()
/// filled can be loaded. Ranks with nothing of a parameter keep no state for
/// it. set_optimizer_state_dict() takes every layout, and a flat parameter's.
///
/// Tensors are copied, to the parameter's device; floating-point ones are cast
/// to its dtype, except "step". A group must have the keys "lr" and "params";
/// for other keys that are missing the optimizer keeps its own values. State
/// that is not in `dict` is dropped.
///
/// A class of torch::optim takes only the keys it knows; Python's other keys
/// must have the value that has no effect. Throws c10::ValueError, and
/// c10::TypeError for values of another kind. Not collective.
TESSERA_API void load_state_dict(
    torch::optim::Optimizer& optimizer,
    const StateDict& dict);

/// Gives each trainable parameter that has no state yet the state that it would
/// have after a step with zero gradients ("step" is 1), so that a dictionary
/// has something to load into. Parameters, gradients and state that is there
/// are not touched. Throws if a parameter that would get state has a gradient,
/// since a step is pending then. Not collective.
TESSERA_API void initialize_state(torch::optim::Optimizer& optimizer);

} // namespace tessera::optim
