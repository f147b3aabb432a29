#include <tessera/comm/init.h>
#include <tessera/deferred/deferred_init.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <utility>

#include "engine/module_units.h"
#include "engine/plain_params.h"
#include "engine/unit.h"
#include "engine/unit_memory.h"
#include "fsdp/open_forwards.h"
#include "fsdp/shard_module.h"
#include "libtorch/alias.h"

namespace tessera {
namespace {

const char* name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::FULL_SHARD:
      return "FULL_SHARD";
    case ShardingStrategy::SHARD_GRAD_OP:
      return "SHARD_GRAD_OP";
    case ShardingStrategy::NO_SHARD:
      return "NO_SHARD";
    case ShardingStrategy::HYBRID_SHARD:
      return "HYBRID_SHARD";
    case ShardingStrategy::HYBRID_SHARD_ZERO2:
      return "HYBRID_SHARD_ZERO2";
  }
  return "unknown";
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HYBRID_SHARD ||
      strategy == ShardingStrategy::HYBRID_SHARD_ZERO2;
}

std::string describe(const FSDPOptions& options, ShardingStrategy strategy) {
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "as it is";
  };
  const MixedPrecision& precision = options.mixed_precision();
  return fmt::format(
      "strategy {}, use_orig_params {}, offload_params {}, param_dtype {}, reduce_dtype {}, buffer_dtype {}, sync_module_states {}, compare_start {}",
      name_of(strategy),
      options.use_orig_params(),
      options.cpu_offload().offload_params(),
      name(precision.param_dtype()),
      name(precision.reduce_dtype()),
      name(precision.buffer_dtype()),
      options.sync_module_states(),
      options.compare_start());
}

engine::Groups groups_for(
    const FSDPOptions& options,
    ShardingStrategy strategy) {
  if (options.process_group() && options.device_mesh()) {
    raise(
        {.call = "FSDP"},
        "both a process_group and a device_mesh were given. Name one of them.");
  }
  if (is_hybrid(strategy)) {
    if (!options.device_mesh() || options.device_mesh()->ndim() != 2) {
      raise<c10::ValueError>(
          {.call = "FSDP"},
          fmt::format(
              "{} needs a device_mesh of two axes: copies, then the ranks that shard each. Use tessera::make_mesh({{copies, ranks}}).",
              name_of(strategy)));
    }
    return fsdp::groups_of(*options.device_mesh(), "FSDP");
  }
  const Group group = options.device_mesh() ? options.device_mesh()->group()
      : options.process_group()             ? *options.process_group()
                                            : world();
  if (strategy != ShardingStrategy::NO_SHARD) {
    return {.all = group, .shard = group};
  }
  engine::Groups groups{.all = group, .shard = group.alone()};
  if (group.size() > 1) {
    groups.replicate = group;
  }
  return groups;
}

/// Has no values, and nobody knows which it should have.
bool is_plain_meta(const at::Tensor& tensor) {
  return tensor.is_meta() && !is_deferred(tensor);
}

void move_to(torch::nn::Module& module, at::Device device) {
  for (const at::Tensor& tensor : module.parameters()) {
    if (!is_plain_meta(tensor) && engine::unit_of(tensor) == nullptr) {
      at::Tensor(tensor).set_data(tensor.detach().to(device));
    }
  }
  for (const at::Tensor& buffer : module.buffers()) {
    if (!is_plain_meta(buffer)) {
      at::Tensor(buffer).set_data(buffer.to(device));
    }
  }
}

void cast_buffers(torch::nn::Module& module, at::ScalarType dtype) {
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.is_floating_point()) {
      at::Tensor(buffer).set_data(buffer.to(dtype));
    }
  }
}

/// Gives parameters on the meta device memory and has `fill` give them values.
void initialize_meta(
    torch::nn::Module& module,
    const std::function<void(torch::nn::Module&)>& fill,
    at::Device device) {
  at::NoGradGuard no_grad;
  const auto visit = [&](torch::nn::Module& one) {
    bool any = false;
    const auto give_memory = [&](const at::Tensor& tensor) {
      if (is_plain_meta(tensor)) {
        engine::show(
            tensor, at::empty_like(tensor, tensor.options().device(device)));
        any = true;
      }
    };
    for (const at::Tensor& tensor : one.parameters(/*recurse=*/false)) {
      give_memory(tensor);
    }
    for (const at::Tensor& tensor : one.buffers(/*recurse=*/false)) {
      give_memory(tensor);
    }
    if (any) {
      fill(one);
    }
  };
  visit(module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    visit(*item.value());
  }
}

} // namespace

FsdpUnit::FsdpUnit(
    std::shared_ptr<engine::Unit> unit,
    torch::nn::Module& module)
    : unit_(std::move(unit)), module_(&module) {}

const std::string& FsdpUnit::name() const {
  return unit_->name();
}

bool FsdpUnit::is_root() const {
  return unit_->is_root();
}

bool FsdpUnit::uses_sharded_strategy() const {
  return unit_->groups().shard.size() > 1;
}

bool FsdpUnit::offloads_params() const {
  return unit_->options().offload;
}

bool FsdpUnit::use_orig_params() const {
  return !unit_->options().one_leaf;
}

at::Tensor FsdpUnit::flat_param() const {
  return unit_->flat_param();
}

int64_t FsdpUnit::sharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : unit_->bundles()) {
    numel += bundle.layout().shard_numel();
  }
  return numel;
}

int64_t FsdpUnit::unsharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : unit_->bundles()) {
    numel += use_orig_params() ? bundle.layout().full_numel()
                               : bundle.layout().unpadded_numel();
  }
  return numel;
}

int64_t FsdpUnit::allocated_numel() const {
  return engine::allocated_numel(*unit_);
}

std::vector<FsdpUnit> fsdp_modules(torch::nn::Module& module, bool root_only) {
  std::vector<FsdpUnit> result;
  const auto units = engine::units_in(module);
  const auto add = [&](torch::nn::Module& one) {
    for (const auto& unit : units) {
      if (unit->home() == &one && (!root_only || unit->is_root())) {
        result.emplace_back(unit, one);
      }
    }
  };
  add(module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    add(*item.value());
  }
  return result;
}

namespace detail {

FsdpHandle::FsdpHandle(
    std::shared_ptr<torch::nn::Module> module,
    const FSDPOptions& options)
    : module_(std::move(module)),
      options_(options),
      strategy_(options.sharding_strategy()) {
  const Group group = options_.device_mesh() ? options_.device_mesh()->group()
      : options_.process_group()             ? *options_.process_group()
                                             : world();
  if (group.size() == 1 && strategy_ != ShardingStrategy::NO_SHARD) {
    TORCH_WARN_ONCE(
        "FSDP is switching to use `NO_SHARD` instead of ",
        name_of(strategy_),
        " since the world size is 1.");
    strategy_ = ShardingStrategy::NO_SHARD;
  }
  const MixedPrecision& precision = options_.mixed_precision();
  fsdp::ShardRequest request{
      .call = "FSDP",
      .description = describe(options_, strategy_),
      .groups = groups_for(options_, strategy_),
      .unit =
          {.layout = engine::Layout::Kind::Flat,
           // Python's: 16 bytes of the compute dtype, so that sizes agree.
           .alignment = {.param = 1, .shard = 1},
           .param_alignment_bytes = options_.use_orig_params() ? 16 : 0,
           .reshard_after_forward = strategy_ == ShardingStrategy::FULL_SHARD ||
               strategy_ == ShardingStrategy::HYBRID_SHARD,
           .param_dtype = precision.param_dtype(),
           .reduce_dtype = precision.reduce_dtype() ? precision.reduce_dtype()
                                                    : precision.param_dtype(),
           .offload = options_.cpu_offload().offload_params(),
           .one_leaf = !options_.use_orig_params(),
           .sync_from_rank0 = options_.sync_module_states(),
           .compare_start = options_.compare_start()},
      .policy = options_.auto_wrap_policy(),
      .sync_buffers = options_.sync_module_states(),
      .uniform = true,
      .state_dict_type = StateDictType::FULL_STATE_DICT};
  for (const auto& ignored : options_.ignored_modules()) {
    request.ignored_modules.insert(ignored.get());
    for (const auto& item : ignored->named_modules()) {
      request.ignored_modules.insert(item.value().get());
    }
    for (const at::Tensor& tensor : ignored->parameters()) {
      request.ignored_params.insert(tensor.unsafeGetTensorImpl());
    }
  }
  if (options_.param_init_fn()) {
    initialize_meta(
        *module_,
        options_.param_init_fn(),
        options_.device_id().value_or(at::Device(at::kCPU)));
  }
  if (options_.device_id()) {
    move_to(*module_, *options_.device_id());
  }
  fsdp::shard_module(*module_, request);
  for (const auto& ignored : options_.ignored_modules()) {
    for (const at::Tensor& tensor : ignored->parameters()) {
      engine::set_ignored(tensor);
    }
  }
  if (precision.buffer_dtype()) {
    cast_buffers(*module_, *precision.buffer_dtype());
  }
}

FsdpHandle::ForwardScope::ForwardScope(const FsdpHandle& handle) {
  if (auto unit = engine::unit_at(*handle.module_)) {
    fsdp::enter_forward(*unit);
    units_.push_back(std::move(unit));
  }
}

FsdpHandle::ForwardScope::~ForwardScope() {
  for (const auto& unit : units_) {
    fsdp::leave_forward(*unit);
  }
}

at::Tensor FsdpHandle::cast_tensor(const at::Tensor& input) const {
  const MixedPrecision& precision = options_.mixed_precision();
  return precision.param_dtype() && precision.cast_root_forward_inputs() &&
          input.defined() && input.is_floating_point()
      ? input.to(*precision.param_dtype())
      : input;
}

} // namespace detail
} // namespace tessera
