#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/optimizer.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "comm/group/all_or_none.h"
#include "comm/group/broadcast_owned.h"
#include "engine/unit.h"
#include "optim/dictionary.h"
#include "zero/gather_state.h"
#include "zero/local_state.h"
#include "zero/overlap.h"
#include "zero/param_buckets.h"
#include "zero/partition.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr const char* kName = "ZeroRedundancyOptimizer";
constexpr const char* kStep = "ZeroRedundancyOptimizer::step";
constexpr const char* kAddGroup = "ZeroRedundancyOptimizer::add_param_group";

ErrorSite site(const Group& group, const char* call) {
  return {.call = call, .rank = group.rank(), .world_size = group.size()};
}

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
          site(group_, kName),
          "ZeroRedundancyOptimizer got an empty parameter list. Pass the parameters of a model.");
    }
    if (overlap_ && param_groups.size() > 1) {
      refuse_groups(site(group_, kName));
    }
    for (const OptimizerParamGroup& group : param_groups) {
      check_group(group);
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
          site(group_, kName),
          "the local optimizer does not have the groups it was given. Pass a function that makes an optimizer of them, such as optimizer_class<optim::AdamW>(1e-3).");
    }
    if (dynamic_cast<optim::NamedOptimizer*>(optim_.get()) != nullptr) {
      raise<c10::TypeError>(
          site(group_, kName),
          "the local optimizer is a NamedOptimizer, whose dictionary has no numbers. Pass the class that it wraps.");
    }
  });
  agree_on(param_groups_, kName);
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

void ZeroRedundancyOptimizer::check_is_set_up(const char* call) const {
  if (overlap_ && !overlap_->is_ready()) {
    raise(
        site(group_, call),
        "This method should not be called until this ZeroRedundancyOptimizer instance has been fully initialized: with overlap_with_ddp that is in the third backward through its hook, in the fourth under static_graph.");
  }
}

void ZeroRedundancyOptimizer::check_group(
    const OptimizerParamGroup& group) const {
  const ErrorSite where = site(group_, kName);
  const size_t index = param_groups_.size();
  if (group.params().empty()) {
    raise<c10::ValueError>(
        where,
        fmt::format(
            "param group {} has no parameters. Pass their list.", index));
  }
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const OptimizerParamGroup& earlier : param_groups_) {
    for (const at::Tensor& param : earlier.params()) {
      seen.insert(param.unsafeGetTensorImpl());
    }
  }
  const at::Tensor& first = param_groups_.empty()
      ? group.params().front()
      : param_groups_.front().params().front();
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& param = group.params()[i];
    const std::string name = fmt::format("parameter {} of group {}", i, index);
    if (!param.defined()) {
      raise<c10::TypeError>(
          where,
          fmt::format(
              "params argument should be an iterable of Tensors, {} is undefined.",
              name));
    }
    if (engine::is_sharded(param)) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "{} is sharded by FSDP, where each rank already has state for its part only. Use the optimizer without ZeRO.",
              name));
    }
    if (!param.is_leaf()) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "can't optimize a non-leaf Tensor: {} was computed from others. Pass parameters.",
              name));
    }
    if (param.layout() != at::kStrided ||
        param.scalar_type() != first.scalar_type()) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "ZeroRedundancyOptimizer only supports using the same dense type for all parameters, {} is {}, parameter 0 of group 0 is {}. Make an optimizer for each type.",
              name,
              param.toString(),
              first.toString()));
    }
    if (!seen.insert(param.unsafeGetTensorImpl()).second) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "{} was given before. Pass each once; tessera::parameters(module) lists tied ones once.",
              name));
    }
  }
}

void ZeroRedundancyOptimizer::agree_on(
    const std::vector<OptimizerParamGroup>& groups,
    const char* call) const {
  std::vector<std::string> items;
  for (size_t i = 0; i < groups.size(); ++i) {
    items.push_back(fmt::format(
        "param group {}: {} parameters", i, groups[i].params().size()));
    for (const at::Tensor& param : groups[i].params()) {
      items.push_back(fmt::format(
          "param group {}: {}{}",
          i,
          c10::toString(param.scalar_type()),
          param.sizes().vec()));
    }
  }
  agree(group_, call, items);
}

void ZeroRedundancyOptimizer::add_param_group(
    const OptimizerParamGroup& group) {
  if (overlap_) {
    refuse_groups(site(group_, kAddGroup));
  }
  check_untouched();
  comm::all_or_none({group_}, kAddGroup, [&] { check_group(group); });
  agree_on({group}, kAddGroup);
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

/// Why the groups differ from those whose parameters have owners; empty if they
/// do not.
std::optional<std::string> ZeroRedundancyOptimizer::objection_to_groups()
    const {
  const auto& added = parts_->partition.groups();
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto place = parts_->partition.place_of(params[i]);
      if (!place) {
        return fmt::format(
            "parameter {} of group {} ({}) was added through torch::optim::Optimizer, so no rank owns it. Call ZeroRedundancyOptimizer::add_param_group().",
            i,
            group,
            params[i].sizes().vec());
      }
      if (place->group != group) {
        return fmt::format(
            "parameter {} of group {} ({}) was parameter {} of group {} when it was added, and its owner steps it with the options of that group. Leave it there, or make a new ZeroRedundancyOptimizer of the groups and load the state into it.",
            i,
            group,
            params[i].sizes().vec(),
            place->index,
            place->group);
      }
    }
  }
  for (size_t group = 0; group < added.size(); ++group) {
    const size_t left =
        group < param_groups_.size() ? param_groups_[group].params().size() : 0;
    if (left != added[group].size()) {
      return fmt::format(
          "group {} was added with {} parameters and has {} now, but their owners continue to step them. Freeze what must not train, or make a new ZeroRedundancyOptimizer of the groups and load the state into it.",
          group,
          added[group].size(),
          left);
    }
  }
  if (param_groups_.size() != optim_->param_groups().size()) {
    return fmt::format(
        "there are {} groups, and {} in the local optimizer. Call ZeroRedundancyOptimizer::add_param_group() alone.",
        param_groups_.size(),
        optim_->param_groups().size());
  }
  return std::nullopt;
}

/// LibTorch's own functions that change groups are not virtual.
void ZeroRedundancyOptimizer::check_untouched() const {
  if (const auto objection = objection_to_groups()) {
    raise<c10::ValueError>(site(group_, kName), *objection);
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
  at::Tensor loss;
  comm::all_or_none({group_}, kStep, [&] {
    check_untouched();
    loss = step_locally(closure, extra);
  });
  give_options_to_local();
  send_params();
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::step_locally(
    const LossClosure& closure,
    const std::any* extra) {
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
        site(group_, kStep),
        "extra arguments were given, but the local optimizer's step takes none. Derive its class from StepTakesExtra.");
  }
  return taker->step_with(inside, *extra);
}

void ZeroRedundancyOptimizer::send_params() {
  const auto& owned = parts_->partition.owned();
  if (parts_->buckets) {
    if (!parts_->buckets->are_current()) {
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
    Lend lend(*this);
    Narrowed narrowed(
        optim_->param_groups().front().params(), params, gradients);
    optim_->step();
  }
  give_options_to_local();
}

/// This rank's part of the state, by the numbers of all parameters, for rank
/// `to`. Throws on all ranks or on none.
StateDict ZeroRedundancyOptimizer::own_state(const char* call, int to) {
  check_is_set_up(call);
  StateDict own;
  comm::all_or_none({group_}, call, [&] {
    if (to < 0 || to >= group_.size()) {
      raise<c10::ValueError>(
          site(group_, call),
          fmt::format(
              "there is no rank {} in group \"{}\" of {}.",
              to,
              group_.name(),
              group_.size()));
    }
    check_untouched();
    give_options_to_local();
    own = zero::with_global_ids(*optim_, param_groups_);
  });
  return own;
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  const StateDict own =
      own_state("ZeroRedundancyOptimizer::consolidate_state_dict", to);
  consolidated_.reset();
  StateDict all = zero::gather_state(group_, to, own);
  if (group_.rank() == to) {
    consolidated_ = std::move(all);
  }
}

StateDict ZeroRedundancyOptimizer::state_dict() const {
  check_is_set_up("ZeroRedundancyOptimizer::state_dict");
  if (!consolidated_) {
    raise(
        site(group_, "ZeroRedundancyOptimizer::state_dict"),
        "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to=...)` on all ranks beforehand if you meant to save the global state.");
  }
  return whole_dict(*consolidated_);
}

/// The state with the options of all groups.
StateDict ZeroRedundancyOptimizer::whole_dict(StateDict state) const {
  const auto access = optim::access_to(*optim_, param_groups_, "state_dict");
  StateList groups;
  int64_t number = 0;
  for (const OptimizerParamGroup& group : param_groups_) {
    StateDict saved;
    access->write_options(group.options(), saved);
    StateList ids;
    for (size_t i = 0; i < group.params().size(); ++i) {
      ids.emplace_back(number++);
    }
    saved.set("params", std::move(ids));
    groups.emplace_back(std::move(saved));
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

bool ZeroRedundancyOptimizer::has_state() const {
  return optim::has_state(*optim_);
}

StateDict ZeroRedundancyOptimizer::collect_state_dict(optim::Collect to) {
  const StateDict own =
      own_state("ZeroRedundancyOptimizer::collect_state_dict");
  if (to == optim::Collect::Nobody) {
    return whole_dict(zero::share_state(group_, own));
  }
  StateDict result;
  const int num_receivers = to == optim::Collect::Rank0 ? 1 : group_.size();
  for (int rank = 0; rank < num_receivers; ++rank) {
    StateDict all = zero::gather_state(group_, rank, own);
    if (group_.rank() == rank) {
      result = whole_dict(std::move(all));
    }
  }
  return result;
}

bool ZeroRedundancyOptimizer::keeps_state_of(const at::Tensor& param) const {
  check_is_set_up("ZeroRedundancyOptimizer::keeps_state_of");
  const auto& groups = optim_->param_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(
        group.params().begin(),
        group.params().end(),
        [&](const at::Tensor& own) { return own.is_same(param); });
  });
}

std::function<void()> ZeroRedundancyOptimizer::snapshot() {
  check_is_set_up("ZeroRedundancyOptimizer::snapshot");
  give_options_to_local();
  return [this, give_back = optim::snapshot(*optim_)] {
    give_back();
    take_options_from_local();
  };
}

void ZeroRedundancyOptimizer::load_state_dict(const StateDict& dict) {
  check_is_set_up("ZeroRedundancyOptimizer::load_state_dict");
  check_untouched();
  optim::load_state_dict(
      *optim_, zero::local_part_of(dict, *optim_, param_groups_));
  take_options_from_local();
}

void ZeroRedundancyOptimizer::initialize_state() {
  check_is_set_up("ZeroRedundancyOptimizer::initialize_state");
  optim::initialize_state(*optim_);
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(
    const JoinArguments& /*arguments*/) {
  if (overlap_) {
    raise<c10::NotImplementedError>(
        site(group_, kName),
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
