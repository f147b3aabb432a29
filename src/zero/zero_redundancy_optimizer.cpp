#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/optimizer.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>

#include <utility>

#include "comm/group/all_or_none.h"
#include "comm/group/broadcast_owned.h"
#include "engine/plain_params.h"
#include "libtorch/recording.h"
#include "optim/tell_engine.h"
#include "zero/overlap.h"
#include "zero/param_buckets.h"
#include "zero/param_groups.h"
#include "zero/partition.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr const char* kName = "ZeroRedundancyOptimizer";
constexpr const char* kStep = "ZeroRedundancyOptimizer::step";
constexpr const char* kAddGroup = "ZeroRedundancyOptimizer::add_param_group";

[[noreturn]] void refuse_groups(const ErrorSite& where) {
  raise(
      where,
      "ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter group. Put all parameters into one, or call step() yourself, without overlap.");
}

/// A rank's optimizer has only some parameters, and their gradients differ.
class Narrowed {
 public:
  Narrowed(
      std::vector<at::Tensor>& held,
      std::vector<at::Tensor> params,
      const std::vector<at::Tensor>& gradients)
      : held_(held), all_(std::exchange(held, std::move(params))) {
    for (size_t i = 0; i < held_.size(); ++i) {
      before_.push_back(
          std::exchange(held_[i].mutable_grad(), gradients[i].detach()));
    }
  }
  ~Narrowed() {
    for (size_t i = 0; i < held_.size(); ++i) {
      held_[i].mutable_grad() = before_[i];
    }
    held_ = std::move(all_);
  }
  Narrowed(const Narrowed&) = delete;
  Narrowed& operator=(const Narrowed&) = delete;

 private:
  std::vector<at::Tensor>& held_;
  std::vector<at::Tensor> all_;
  std::vector<at::Tensor> before_;
};

} // namespace

struct ZeroRedundancyOptimizer::Parts {
  explicit Parts(zero::Partition of) : partition(std::move(of)) {}

  zero::Partition partition;
  std::optional<zero::ParamBuckets>
      buckets; // where parameters are bucket views
};

/// Gives the options to the local optimizer while it works: each group has one
/// object, so that references to it stay valid.
class ZeroRedundancyOptimizer::Lend {
 public:
  explicit Lend(ZeroRedundancyOptimizer& owner) : owner_(owner) {
    owner_.exchange_options();
  }
  ~Lend() {
    owner_.exchange_options();
  }
  Lend(const Lend&) = delete;
  Lend& operator=(const Lend&) = delete;

  /// Takes the options back for a while.
  at::Tensor call(const LossClosure& closure) {
    const Lend back(owner_);
    return closure();
  }

 private:
  ZeroRedundancyOptimizer& owner_;
};

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(
    const std::vector<at::Tensor>& params,
    const MakeOptimizer& make_optimizer,
    ZeroOptions options)
    : ZeroRedundancyOptimizer(
          params.empty()
              ? std::vector<OptimizerParamGroup>()
              : std::vector<OptimizerParamGroup>{OptimizerParamGroup(params)},
          make_optimizer,
          std::move(options)) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(
    const std::vector<OptimizerParamGroup>& param_groups,
    const MakeOptimizer& make_optimizer,
    ZeroOptions options)
    : torch::optim::Optimizer(std::vector<OptimizerParamGroup>(), nullptr),
      group_(options.process_group().value_or(Group())),
      make_optimizer_(make_optimizer) {
  if (!group_.valid()) {
    group_ = world();
  }
  parts_ = std::make_unique<Parts>(zero::Partition(group_.size()));
  if (options.overlap_with_ddp()) {
    overlap_ = std::make_shared<Overlap>(*this);
  }
  std::vector<OptimizerParamGroup> local;
  comm::all_or_none({group_}, kName, [&] {
    if (param_groups.empty()) {
      raise<c10::ValueError>(
          zero::site(group_, kName),
          "ZeroRedundancyOptimizer got an empty parameter list. Pass the parameters of a model.");
    }
    if (overlap_ && param_groups.size() > 1) {
      refuse_groups(zero::site(group_, kName));
    }
    for (const OptimizerParamGroup& group : param_groups) {
      zero::check_group(group, param_groups_, zero::site(group_, kName));
      parts_->partition.add_group(group.params());
      param_groups_.emplace_back(group.params());
      auto& part = local.emplace_back(group);
      part.params() = overlap_
          ? std::vector<at::Tensor>() // until buckets are known
          : parts_->partition.of_group(group_.rank(), param_groups_.size() - 1);
    }
    optim_ = make_optimizer(local);
    if (optim_ == nullptr || optim_->param_groups().size() != local.size()) {
      raise<c10::ValueError>(
          zero::site(group_, kName),
          "the local optimizer does not have the groups it was given. Pass a function that makes an optimizer of them, such as optimizer_class<optim::AdamW>(1e-3).");
    }
    if (group_.size() > 1 &&
        dynamic_cast<torch::optim::LBFGS*>(optim_.get()) != nullptr) {
      raise<c10::TypeError>(
          zero::site(group_, kName),
          "LBFGS needs dot products over all parameters, and a rank steps only its own. Use another optimizer, or LBFGS without ZeroRedundancyOptimizer.");
    }
    if (dynamic_cast<optim::NamedOptimizer*>(optim_.get()) != nullptr) {
      raise<c10::TypeError>(
          zero::site(group_, kName),
          "the local optimizer is a NamedOptimizer, whose dictionary has no numbers. Pass the class that it wraps.");
    }
  });
  agree(group_, kName, zero::describe(param_groups_));
  defaults_ = optim_->defaults().clone();
  take_options_from_local();
  if (options.parameters_as_bucket_view() && !overlap_) {
    parts_->buckets.emplace();
    parts_->buckets->build(parts_->partition.owned());
  }
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() {
  if (overlap_) {
    overlap_->disconnect();
  }
}

torch::optim::Optimizer& ZeroRedundancyOptimizer::optim() {
  check_is_set_up("ZeroRedundancyOptimizer::optim");
  return *optim_;
}

const torch::optim::Optimizer& ZeroRedundancyOptimizer::optim() const {
  check_is_set_up("ZeroRedundancyOptimizer::optim");
  return *optim_;
}

bool ZeroRedundancyOptimizer::skip_where(const at::Tensor& found_inf) {
  auto* local = dynamic_cast<optim::DeviceSkip*>(optim_.get());
  return local != nullptr && local->skip_where(found_inf);
}

std::optional<std::string> ZeroRedundancyOptimizer::capture_objection() const {
  if (overlap_) {
    return "a ZeroRedundancyOptimizer with overlap_with_ddp steps on threads of the host.";
  }
  return optim::capture_objection(*optim_);
}

void ZeroRedundancyOptimizer::check_is_set_up(const char* call) const {
  if (overlap_ && !overlap_->is_ready()) {
    raise(
        zero::site(group_, call),
        "This method should not be called until this ZeroRedundancyOptimizer instance has been fully initialized: with overlap_with_ddp that is in the third backward through its hook, in the fourth under static_graph.");
  }
}

void ZeroRedundancyOptimizer::add_param_group(
    const OptimizerParamGroup& group) {
  if (overlap_) {
    refuse_groups(zero::site(group_, kAddGroup));
  }
  check_untouched();
  comm::all_or_none({group_}, kAddGroup, [&] {
    zero::check_group(group, param_groups_, zero::site(group_, kName));
  });
  agree(group_, kAddGroup, zero::describe({group}));
  zero::Partition partition = parts_->partition;
  partition.add_group(group.params());
  OptimizerParamGroup local = group;
  local.params() = partition.of_group(group_.rank(), param_groups_.size());
  comm::all_or_none({group_}, kAddGroup, [&] {
    if (auto* own = dynamic_cast<optim::Optimizer*>(optim_.get())) {
      own->add_param_group(local);
    } else {
      optim_->add_param_group(local);
    }
  });
  parts_->partition = std::move(partition);
  param_groups_.emplace_back(
      group.params(), optim_->param_groups().back().options().clone());
  if (parts_->buckets) {
    parts_->buckets->build(parts_->partition.owned());
  }
}

/// LibTorch's own functions that change groups are not virtual.
void ZeroRedundancyOptimizer::check_untouched() const {
  const auto objection = zero::objection_to_groups(
      param_groups_, parts_->partition, optim_->param_groups().size());
  if (objection) {
    raise<c10::ValueError>(zero::site(group_, kName), *objection);
  }
}

void ZeroRedundancyOptimizer::give_options_to_local() {
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    optim_->param_groups()[i].set_options(param_groups_[i].options().clone());
  }
}

void ZeroRedundancyOptimizer::take_options_from_local() {
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(optim_->param_groups()[i].options().clone());
  }
}

void ZeroRedundancyOptimizer::exchange_options() {
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    OptimizerParamGroup& local = optim_->param_groups()[i];
    std::swap(param_groups_[i], local);
    std::swap(param_groups_[i].params(), local.params());
  }
}

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  if (overlap_) {
    TORCH_WARN(
        "`step()` should not be included in the training loop when `overlap_with_ddp=True`: backward steps.");
    return {};
  }
  Join::notify_join_context(*this);
  return step_and_send(closure, nullptr);
}

at::Tensor ZeroRedundancyOptimizer::step(
    LossClosure closure,
    const std::any& extra) {
  if (overlap_) {
    return step(std::move(closure));
  }
  Join::notify_join_context(*this);
  return step_and_send(closure, &extra);
}

at::Tensor ZeroRedundancyOptimizer::step_and_send(
    const LossClosure& closure,
    const std::any* extra) {
  if (!std::exchange(has_compared_values_, true)) {
    zero::warn_of_unequal_values(group_, param_groups_);
  }
  at::Tensor loss;
  comm::all_or_none({group_}, kStep, [&] {
    check_untouched();
    loss = step_locally(closure, extra);
  });
  optim::tell_of_step(param_groups_); // of all ranks' parameters
  give_options_to_local();
  send_params();
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::step_locally(
    const LossClosure& closure,
    const std::any* extra) {
  const engine::UnnotedSteps unnoted; // a rank may have no parameter to step
  Lend lend(*this);
  LossClosure inside;
  if (closure) {
    // Closures call zero_grad() here.
    inside = [&] { return lend.call(closure); };
  }
  if (extra == nullptr) {
    return closure ? optim_->step(inside) : optim_->step();
  }
  auto* taker = dynamic_cast<StepTakesExtra*>(optim_.get());
  if (taker == nullptr) {
    raise<c10::TypeError>(
        zero::site(group_, kStep),
        "extra arguments were given, but the local optimizer's step takes none. Derive its class from StepTakesExtra.");
  }
  return taker->step_with(inside, *extra);
}

void ZeroRedundancyOptimizer::send_params() {
  const auto& owned = parts_->partition.owned();
  if (parts_->buckets) {
    if (!parts_->buckets->are_current()) {
      libtorch::refuse_in_recording(
          kStep,
          "Its buckets must be rebuilt, since other parameters are trainable now: run an eager step first.");
      TORCH_WARN(
          "ZeroRedundancyOptimizer detected that the trainable parameters changed; rebuilding the parameter buckets");
      parts_->buckets->build(owned);
    }
    comm::broadcast_owned(group_, parts_->buckets->pieces());
  } else {
    comm::broadcast_owned(group_, owned);
  }
  // Autograd does not see what communication writes: graphs that saved the old
  // values must not run backward.
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank != group_.rank()) {
      for (const at::Tensor& param : owned[rank]) {
        param.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

/// For Overlap: the parameters that this rank steps are known.
void ZeroRedundancyOptimizer::make_local_optimizer(
    std::vector<at::Tensor> own) {
  optim_ = make_optimizer_({OptimizerParamGroup(
      std::move(own), param_groups_.front().options().clone())});
  give_options_to_local();
}

/// For Overlap: steps some of this rank's parameters.
void ZeroRedundancyOptimizer::step_part(
    const std::vector<at::Tensor>& params,
    const std::vector<at::Tensor>& gradients) {
  check_untouched();
  {
    const engine::UnnotedSteps unnoted; // ranks make different numbers of them
    Lend lend(*this);
    Narrowed narrowed(
        optim_->param_groups().front().params(), params, gradients);
    optim_->step();
  }
  give_options_to_local();
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(
    const JoinArguments& /*arguments*/) {
  if (overlap_) {
    raise<c10::NotImplementedError>(
        zero::site(group_, kName),
        "with overlap_with_ddp the DistributedDataParallel steps it, so it cannot be joined by itself. Join the DistributedDataParallel alone.");
  }
  struct Hook : JoinHook {
    explicit Hook(ZeroRedundancyOptimizer& owner) : zero(owner) {}
    void main_hook() override {
      zero.step();
    }
    ZeroRedundancyOptimizer& zero;
  };
  return std::make_unique<Hook>(*this);
}

at::Device ZeroRedundancyOptimizer::join_device() const {
  return param_groups_.front().params().front().device();
}

} // namespace tessera
