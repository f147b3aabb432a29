#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/ddp/join.h>
#include <tessera/optim/capturable.h>
#include <tessera/optim/device_skip.h>
#include <tessera/optim/state_dict.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <any>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Makes the optimizer of one rank, for the groups that it is given. Their
/// lists of parameters may be empty.
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<torch::optim::OptimizerParamGroup>& groups)>;

/// optimizer_class<optim::AdamW>(1e-3), optimizer_class<torch::optim::SGD>(
/// torch::optim::SGDOptions(0.1).momentum(0.9)): makes an O of the groups and
/// these arguments.
template <class O, class... Arguments>
MakeOptimizer optimizer_class(Arguments... arguments) {
  return [arguments...](
             const std::vector<torch::optim::OptimizerParamGroup>& groups)
             -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<O>(groups, arguments...);
  };
}

/// An optimizer whose step takes more than a closure.
class TESSERA_API StepTakesExtra {
 public:
  virtual ~StepTakesExtra() = default;
  /// What ZeroRedundancyOptimizer::step(closure, extra) calls on the local
  /// optimizer.
  virtual at::Tensor step_with(
      torch::optim::Optimizer::LossClosure closure,
      const std::any& extra) = 0;
};

/// Options of ZeroRedundancyOptimizer, with Python's names and defaults.
struct TESSERA_API ZeroOptions {
  /// The ranks that share the work; default: the world.
  TORCH_ARG(std::optional<Group>, process_group) = std::nullopt;
  /// Parameters become views of one tensor per device and owner: nothing is
  /// packed to be sent, but their memory is freed together.
  TORCH_ARG(bool, parameters_as_bucket_view) = false;
  /// Steps are made in the backward of a DistributedDataParallel, by
  /// hook_with_zero_step() or hook_with_zero_step_interleaved(). The local
  /// optimizer is made when the buckets of gradients are final; parameters then
  /// become views of the tensors that are sent. Only one param group is
  /// supported.
  TORCH_ARG(bool, overlap_with_ddp) = false;
};

/// Optimizer state divided over the ranks (ZeRO stage 1): each parameter has an
/// owner, which alone keeps state for it, steps it, and then sends it to the
/// other ranks.
///
///   ZeroRedundancyOptimizer optimizer(
///       model->parameters(), optimizer_class<optim::AdamW>(1e-3));
///
/// Works over any optimizer of tessera::optim or torch::optim. Every rank must
/// have all parameters, with equal values, and averaged gradients, as in
/// data-parallel training. It is a torch::optim::Optimizer over all parameters:
/// schedulers work with it, zero_grad() clears all gradients. It shares its
/// options with the local optimizer: a change to either is a change to both.
///
/// Parameters are divided by size: the largest first, each to the rank with the
/// fewest elements so far. The constructor, add_param_group(), step() and
/// consolidate_state_dict() are collective over the process group.
class TESSERA_API ZeroRedundancyOptimizer : public torch::optim::Optimizer,
                                            public optim::StatefulOptimizer,
                                            public optim::DeviceSkip,
                                            public optim::Capturable,
                                            public Joinable {
 public:
  /// Throws on every rank c10::ValueError if there are no parameters or a group
  /// is empty, if a parameter is given twice, is not a leaf or is sharded, and
  /// for dtypes that differ or are sparse; c10::TypeError for an undefined
  /// tensor; DisagreementError if ranks pass different shapes.
  ZeroRedundancyOptimizer(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      const MakeOptimizer& make_optimizer,
      ZeroOptions options = {});
  ZeroRedundancyOptimizer(
      const std::vector<at::Tensor>& params,
      const MakeOptimizer& make_optimizer,
      ZeroOptions options = {});
  ~ZeroRedundancyOptimizer() override;

  /// Calls the local optimizer's step, then all ranks get the new parameters.
  /// Throws c10::ValueError on every rank, before anything is stepped, if the
  /// groups do not have the parameters that they were added with. Returns what
  /// the local step returns: the loss of this rank's closure. If the local step
  /// throws on a rank, all ranks throw. With overlap_with_ddp it only warns.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// The same for a local optimizer that is StepTakesExtra; throws
  /// c10::TypeError for others.
  at::Tensor step(LossClosure closure, const std::any& extra);

  /// Adds a group; existing parameters keep their owners. Throws as the
  /// constructor does, and with overlap_with_ddp. Hides LibTorch's function,
  /// which must not be called.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// The local optimizer: it has a group for each of ours, with this rank's
  /// parameters, the largest first; a group may be empty. With
  /// overlap_with_ddp, this function and all functions about state throw
  /// c10::Error until backwards step.
  torch::optim::Optimizer& optim();
  const torch::optim::Optimizer& optim() const;

  /// True with overlap_with_ddp: backward steps, and step() does not.
  bool steps_in_backward() const {
    return overlap_ != nullptr;
  }
  /// Asks the local optimizer.
  bool skip_where(const at::Tensor& found_inf) override;
  /// Asks the local optimizer. With overlap_with_ddp, steps cannot be captured.
  std::optional<std::string> capture_objection() const override;

  /// Collects the state of all ranks on rank `to` of the process group, in host
  /// memory, until the next call. Rank `to` needs memory for the state and a
  /// bucket of 32 MB.
  void consolidate_state_dict(int to = 0);
  /// The state that was consolidated on this rank, with the current options, as
  /// an unsharded optimizer would return it. Throws c10::Error if
  /// consolidate_state_dict() has not been called for this rank. Shares tensors
  /// with the consolidated state, none with the optimizer. Not collective.
  StateDict state_dict() const override;
  /// Takes what state_dict() of this class or of the unsharded optimizer
  /// returns, and keeps this rank's part. All of it is checked, so that equal
  /// dictionaries load on every rank or on none. `dict` is not changed. Not
  /// collective.
  void load_state_dict(const StateDict& dict) override;
  /// Initializes the state of this rank's parameters. Not collective.
  void initialize_state() override;
  bool has_state() const override;
  /// For get_state_dict(): consolidate_state_dict() and state_dict() in one
  /// call, which keeps nothing here. With optim::Collect::Nobody it returns
  /// sharded tensors: each rank has those of the parameters it owns, in the
  /// optimizer's own memory. Collective.
  StateDict collect_state_dict(optim::Collect to) override;
  bool keeps_state_of(const at::Tensor& param) const override;
  std::function<void()> snapshot() override;

  /// A rank without inputs continues to make steps, with the gradients it has.
  /// Throws c10::NotImplementedError with overlap_with_ddp: join the
  /// DistributedDataParallel, whose reductions step.
  std::unique_ptr<JoinHook> join_hook(const JoinArguments& arguments) override;
  /// See Joinable.
  at::Device join_device() const override;
  Group join_process_group() const override {
    return group_;
  }

  /// For hook_with_zero_step(); not part of the public contract.
  class Overlap;

 private:
  class Lend;
  struct Parts;

  void check_untouched() const;
  StateDict own_state(const char* call, int to = 0);
  StateDict whole_dict(StateDict state) const;
  void check_is_set_up(const char* call) const;
  void give_options_to_local();
  void take_options_from_local();
  void exchange_options();
  at::Tensor step_locally(const LossClosure& closure, const std::any* extra);
  at::Tensor step_and_send(const LossClosure& closure, const std::any* extra);
  void send_params();
  void make_local_optimizer(std::vector<at::Tensor> own);
  void step_part(
      const std::vector<at::Tensor>& params,
      const std::vector<at::Tensor>& gradients);

  Group group_;
  MakeOptimizer make_optimizer_;
  /// Null unless steps are made in backward; shared with the hook.
  std::shared_ptr<Overlap> overlap_;
  std::unique_ptr<torch::optim::Optimizer> optim_;
  std::unique_ptr<Parts> parts_;
  bool has_compared_values_ = false;
  /// The state that consolidate_state_dict() left here.
  std::optional<StateDict> consolidated_;
};

} // namespace tessera
