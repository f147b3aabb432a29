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
    case ShardingStrategy::FullShard:
      return "FullShard";
    case ShardingStrategy::ShardGradOp:
      return "ShardGradOp";
    case ShardingStrategy::NoShard:
      return "NoShard";
    case ShardingStrategy::HybridShard:
      return "HybridShard";
    case ShardingStrategy::HybridShardZero2:
      return "HybridShardZero2";
  }
  return "unknown";
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HybridShard ||
      strategy == ShardingStrategy::HybridShardZero2;
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
  if (strategy != ShardingStrategy::NoShard) {
    return {.all = group, .shard = group};
  }
  engine::Groups groups{.all = group, .shard = group.alone()};
  if (group.size() > 1) {
    groups.replicate = group;
  }
  return groups;
}

/// Whether the tensor has no values and none were recorded for it.
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

/// Allocates parameters that are on the meta device and lets `fill` initialize
/// them.
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

FSDPUnit::FSDPUnit(
    std::shared_ptr<engine::Unit> unit,
    torch::nn::Module& module)
    : unit_(std::move(unit)), module_(&module) {}

const std::string& FSDPUnit::name() const {
  return unit_->name();
}

bool FSDPUnit::is_root() const {
  return unit_->is_root();
}

bool FSDPUnit::uses_sharded_strategy() const {
  return unit_->groups().shard.size() > 1;
}

bool FSDPUnit::offloads_params() const {
  return unit_->options().offload;
}

bool FSDPUnit::use_orig_params() const {
  return !unit_->options().one_leaf;
}

at::Tensor FSDPUnit::flat_param() const {
  return unit_->flat_param();
}

int64_t FSDPUnit::sharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : unit_->bundles()) {
    numel += bundle.layout().shard_numel();
  }
  return numel;
}

int64_t FSDPUnit::unsharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : unit_->bundles()) {
    numel += use_orig_params() ? bundle.layout().full_numel()
                               : bundle.layout().unpadded_numel();
  }
  return numel;
}

int64_t FSDPUnit::allocated_numel() const {
  return engine::allocated_numel(*unit_);
}

std::vector<FSDPUnit> fsdp_units(ModuleRef module, bool root_only) {
  std::vector<FSDPUnit> result;
  const auto units = engine::units_in(module);
  const auto add = [&](torch::nn::Module& one) {
    for (const auto& unit : units) {
      if (unit->home() == &one && (!root_only || unit->is_root())) {
        result.emplace_back(unit, one);
      }
    }
  };
  add(module);
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    add(*item.value());
  }
  return result;
}

namespace detail {

FSDPHandle::FSDPHandle(
    std::shared_ptr<torch::nn::Module> module,
    const FSDPOptions& options)
    : module_(std::move(module)),
      options_(options),
      strategy_(options.sharding_strategy()) {
  const Group group = options_.device_mesh() ? options_.device_mesh()->group()
      : options_.process_group()             ? *options_.process_group()
                                             : world();
  if (group.size() == 1 && strategy_ != ShardingStrategy::NoShard) {
    TORCH_WARN_ONCE(
        "FSDP is switching to use `NoShard` instead of ",
        name_of(strategy_),
        " since the world size is 1.");
    strategy_ = ShardingStrategy::NoShard;
  }
  const MixedPrecision& precision = options_.mixed_precision();
  fsdp::ShardRequest request{
      .call = "FSDP",
      .description = describe(options_, strategy_),
      .groups = groups_for(options_, strategy_),
      .unit =
          {.layout = engine::Layout::Kind::Flat,
           // As in Python, 16 bytes of the compute dtype: sizes agree.
           .alignment = {.param = 1, .shard = 1},
           .param_alignment_bytes = options_.use_orig_params() ? 16 : 0,
           .reshard_after_forward = strategy_ == ShardingStrategy::FullShard ||
               strategy_ == ShardingStrategy::HybridShard,
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
      .state_dict_type = StateDictType::FullStateDict};
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

FSDPHandle::ForwardScope::ForwardScope(const FSDPHandle& handle) {
  if (auto unit = engine::unit_at(*handle.module_)) {
    fsdp::enter_forward(*unit);
    units_.push_back(std::move(unit));
  }
}

FSDPHandle::ForwardScope::~ForwardScope() {
  for (const auto& unit : units_) {
    fsdp::leave_forward(*unit);
  }
}

at::Tensor FSDPHandle::cast_tensor(const at::Tensor& input) const {
  const MixedPrecision& precision = options_.mixed_precision();
  return precision.param_dtype() && precision.cast_root_forward_inputs() &&
          input.defined() && input.is_floating_point()
      ? input.to(*precision.param_dtype())
      : input;
}

} // namespace detail
} // namespace tessera
