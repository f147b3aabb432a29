#pragma once

#include <tessera/api.h>
#include <tessera/optim/capturable.h>
#include <tessera/optim/options.h>
#include <tessera/optim/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::optim {

/// The state that an optimizer keeps for a parameter: values by Python's names,
/// and any others that were added or loaded.
struct TESSERA_API ParamState
    : torch::optim::OptimizerCloneableParamState<ParamState> {
  StateDict values; // by name
};

/// A value that an optimizer keeps for each parameter.
struct TESSERA_API StateField {
  /// What it looks like.
  enum class Kind {
    /// Shape, dtype and device of the parameter.
    LikeParam,
    /// A float32 scalar in host memory.
    HostScalar,
    /// A float32 scalar on the parameter's device, for kernels that read it
    /// there.
    DeviceScalar,
  };
  const char* name; // Python's
  Kind kind; // its shape and place
  /// Always present if the parameter has state at all.
  bool is_required = true;
};

/// Parameters that one call of a kernel can update: of one dtype and device,
/// with their gradients and state. Complex parameters are treated as pairs of
/// reals.
class TESSERA_API Batch {
 public:
  /// For kernels, all of the same length.
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> gradients;

  /// The state of that name for all parameters, filled with `initial` if a
  /// parameter has none yet.
  std::vector<at::Tensor> state(const StateField& field, double initial = 0);
  /// The parameters that have state of that name, and those that do not.
  std::pair<Batch, Batch> split_by(const StateField& field) const;

 private:
  friend class Optimizer;
  struct Owner {
    at::Tensor param;
    /// The parameter, or a contiguous copy for kernels that do not support
    /// strides.
    at::Tensor dense;
    StateDict* state;
  };
  void add(Owner owner, const at::Tensor& gradient);
  void write_back() const;

  std::vector<Owner> owners_;
};

/// Whether a kernel for `batch` should read Options::lr_on_device(): true if
/// that scalar exists, is on the parameters' device, and has the value of the
/// group's learning rate. Throws c10::Error if the step is being captured and
/// has changed the learning rate, which a replay would not do.
TESSERA_API bool reads_lr_on_device(const Options& options, const Batch& batch);

/// Base of Tessera's optimizers: param groups with open options, state by name,
/// dictionaries in Python's form. It is a torch::optim::Optimizer, so
/// LibTorch's schedulers work with it.
///
/// Options that a group did not set are the optimizer's defaults, as in Python.
/// Parameters without a gradient are left alone, and so are empty ones (shards
/// of a rank that has nothing). State is created when a parameter first has a
/// gradient. Shards are updated locally: a step does not communicate. The one
/// exception is Muon, which needs whole matrices.
///
/// To write another optimizer, derive from this class: name the state in
/// state_fields(), and update a batch in update().
class TESSERA_API Optimizer : public torch::optim::Optimizer,
                              public StatefulOptimizer,
                              public Capturable {
 public:
  /// Runs `closure` first, if there is one, with gradients enabled, and returns
  /// its loss. Throws, before anything is changed, for sparse gradients, for
  /// sharded parameters (an optimizer that was made before fully_shard), and
  /// for a group that was added by LibTorch's add_param_group(). Not
  /// collective, except for Muon on shards.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group, with the options it has. Throws as the constructor does.
  /// Hides LibTorch's function, which is not virtual: if that is called through
  /// a torch::optim::Optimizer&, it drops the group's options, so the next
  /// step() throws.
  virtual void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// LibTorch's archives hold the state of its own classes only: both throw
  /// c10::NotImplementedError. Use state_dict() instead.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// See the functions of these names in state_dict.h.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& dict) override;
  void initialize_state() override;

  /// By default returns an objection, since an optimizer is not known to read
  /// everything on the device. Override it to return std::nullopt if update()
  /// reads nothing on the host, and the learning rate from
  /// Options::lr_on_device().
  std::optional<std::string> capture_objection() const override;

  /// The class's name, for errors: "AdamW".
  const std::string& name() const {
    return name_;
  }
  /// The state of a parameter, to read or to add to; empty at first.
  StateDict& state_of(const at::Tensor& param);
  /// Null if the parameter has no state.
  const StateDict* find_state(const at::Tensor& param) const;

 protected:
  /// Throws c10::ValueError for options out of range and for sharded parameters
  /// (pass their shards, tessera::parameters(module)); c10::TypeError for a
  /// group with options of another class than `defaults`.
  Optimizer(
      std::string name,
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      std::unique_ptr<Options> defaults);

  /// Makes one step for the parameters of `batch`. `options` are complete and
  /// of the class of the defaults. Gradients are disabled.
  virtual void update(const Options& options, Batch& batch) = 0;
  virtual std::vector<StateField> state_fields() const = 0;
  /// Gives the parameters of `batch` the state that a step with zero gradients
  /// would give them. They are stand-ins of this rank's shards, and their
  /// values do not matter. By default it calls update().
  virtual void initialize(const Options& options, Batch& batch);

  /// For an optimizer that needs more of a parameter than this rank's shard:
  /// true for parameters that step_together() updates. update() does not get
  /// them. By default there are none.
  virtual bool is_stepped_together(const at::Tensor& param) const;
  /// Runs `checks`, which throws if a step cannot be made and changes nothing.
  /// An optimizer that steps parameters together has all ranks throw if one
  /// does.
  virtual void check_step(const std::function<void()>& checks);
  /// Updates the parameters that are stepped together, of all groups, before
  /// update() is called for the others. Gradients are disabled.
  virtual void step_together();

  /// The group's options, completed by the defaults and checked.
  const Options& options_of(size_t group);

 private:
  friend class OwnAccess;

  [[noreturn]] void refuse_archive() const;
  void check_groups();
  void check_gradient(size_t group, size_t index) const;
  std::vector<Batch> batches_of(size_t group);
  static Batch& batch_for(std::vector<Batch>& batches, const at::Tensor& param);

  std::string name_;
  // That add_param_group() here has seen. Others watch how long it lives.
  const std::shared_ptr<size_t> num_groups_ = std::make_shared<size_t>(0);
};

} // namespace tessera::optim
