#include "fsdp/fsdp_request.h"

#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <string>

#include "fsdp/shard_module.h"

namespace tessera::fsdp {
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

std::string describe_options(
    const FSDPOptions& options,
    ShardingStrategy strategy) {
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "as it is";
  };
  const MixedPrecision& precision = options.mixed_precision();
  return fmt::format(
      "strategy {}, use_orig_params {}, offload_params {}, param_dtype {}, reduce_dtype {}, buffer_dtype {}, keep_cast_shards {}, sync_module_states {}, compare_start {}",
      name_of(strategy),
      options.use_orig_params(),
      options.cpu_offload().offload_params(),
      name(precision.param_dtype()),
      name(precision.reduce_dtype()),
      name(precision.buffer_dtype()),
      precision.keep_cast_shards(),
      options.sync_module_states(),
      options.compare_start());
}

/// All ranks that train.
Group group_of(const FSDPOptions& options) {
  return options.device_mesh()  ? options.device_mesh()->group()
      : options.process_group() ? *options.process_group()
                                : world();
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
    return groups_of(*options.device_mesh(), "FSDP");
  }
  const Group group = group_of(options);
  if (strategy != ShardingStrategy::NoShard) {
    return {.all = group, .shard = group};
  }
  engine::Groups groups{.all = group, .shard = group.alone()};
  if (group.size() > 1) {
    groups.replicate = group;
  }
  return groups;
}

} // namespace

ShardingStrategy strategy_of(const FSDPOptions& options) {
  const ShardingStrategy strategy = options.sharding_strategy();
  if (group_of(options).size() > 1 || strategy == ShardingStrategy::NoShard) {
    return strategy;
  }
  TORCH_WARN_ONCE(
      "FSDP is switching to use `NoShard` instead of ",
      name_of(strategy),
      " since the world size is 1.");
  return ShardingStrategy::NoShard;
}

ShardRequest request_of(const FSDPOptions& options, ShardingStrategy strategy) {
  const MixedPrecision& precision = options.mixed_precision();
  ShardRequest request{
      .call = "FSDP",
      .description = describe_options(options, strategy),
      .groups = groups_for(options, strategy),
      .unit =
          {.layout = engine::Layout::Kind::Flat,
           // As in Python, 16 bytes of the compute dtype: sizes agree.
           .alignment = {.param = 1, .shard = 1},
           .param_alignment_bytes = options.use_orig_params() ? 16 : 0,
           .reshard_after_forward = strategy == ShardingStrategy::FullShard ||
               strategy == ShardingStrategy::HybridShard,
           .param_dtype = precision.param_dtype(),
           .reduce_dtype = precision.reduce_dtype() ? precision.reduce_dtype()
                                                    : precision.param_dtype(),
           .keep_cast_shards = precision.keep_cast_shards(),
           .offload = options.cpu_offload().offload_params(),
           .one_leaf = !options.use_orig_params(),
           .sync_from_rank0 = options.sync_module_states(),
           .compare_start = options.compare_start()},
      .policy = options.auto_wrap_policy(),
      .sync_buffers = options.sync_module_states(),
      .uniform = true,
      .state_dict_type = StateDictType::FullStateDict};
  for (const auto& ignored : options.ignored_modules()) {
    request.ignored_modules.insert(ignored.get());
    for (const auto& item : ignored->named_modules()) {
      request.ignored_modules.insert(item.value().get());
    }
    for (const at::Tensor& tensor : ignored->parameters()) {
      request.ignored_params.insert(tensor.unsafeGetTensorImpl());
    }
  }
  return request;
}

} // namespace tessera::fsdp
