#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "engine/module_units.h"
#include "engine/plain_params.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/shard_module.h"

namespace tessera {
namespace {

std::string describe(const FullyShardOptions& options) {
  const auto& policy = options.mp_policy();
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "as it is";
  };
  return fmt::format(
      "layout {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}, keep_cast_shards {}, offload {}, overlap_bytes {}, compare_start {}",
      options.layout() == ShardLayout::Flat ? "Flat" : "Dim0",
      options.reshard_after_forward(),
      name(policy.param_dtype()),
      name(policy.reduce_dtype()),
      policy.keep_cast_shards(),
      options.offload_policy().has_value(),
      options.overlap_bytes().value_or(-1),
      options.compare_start());
}

} // namespace

void fully_shard(ModuleRef module, const FullyShardOptions& options) {
  if (options.group() && options.mesh()) {
    raise(
        {.call = "fully_shard"},
        "both a group and a mesh were given. Name one of them.");
  }
  if (options.overlap_bytes().value_or(0) < 0) {
    raise<c10::ValueError>(
        {.call = "fully_shard"},
        fmt::format(
            "overlap_bytes is {}; expected 0 or more.",
            *options.overlap_bytes()));
  }
  fsdp::ShardRequest request{
      .call = "fully_shard",
      .description = describe(options),
      .unit =
          {.layout = options.layout() == ShardLayout::Flat
               ? engine::Layout::Kind::Flat
               : engine::Layout::Kind::Dim0,
           .reshard_after_forward = options.reshard_after_forward(),
           .param_dtype = options.mp_policy().param_dtype(),
           .reduce_dtype = options.mp_policy().reduce_dtype(),
           .keep_cast_shards = options.mp_policy().keep_cast_shards(),
           .overlap_bytes = options.overlap_bytes(),
           .offload = options.offload_policy().has_value(),
           .compare_start = options.compare_start()},
      .policy = options.policy()};
  if (options.mesh()) {
    request.groups = fsdp::groups_of(*options.mesh(), request.call);
  } else {
    const Group group = options.group() ? *options.group() : world();
    request.groups = {.all = group, .shard = group};
  }
  for (const at::Tensor& tensor : options.ignored_params()) {
    request.ignored_params.insert(tensor.unsafeGetTensorImpl());
  }
  fsdp::shard_module(module, request);
  for (const at::Tensor& tensor : options.ignored_params()) {
    engine::set_ignored(tensor);
  }
}

void unshard(ModuleRef module) {
  for (const auto& unit : engine::units_not_summoned(module, "unshard")) {
    unit->schedule().gather(*unit);
  }
}

void reshard(ModuleRef module) {
  engine::reshard_units(module, "reshard");
}

void set_requires_gradient_sync(ModuleRef module, bool on) {
  for (const auto& unit : engine::units_in(module)) {
    unit->gradients().set_syncs(on);
  }
}

void reduce_gradients(ModuleRef module) {
  const auto units = engine::units_not_summoned(module, "reduce_gradients");
  std::vector<engine::Schedule*> schedules; // in the order of the units
  for (const auto& unit : units) {
    engine::Schedule* schedule = &unit->schedule();
    if (std::find(schedules.begin(), schedules.end(), schedule) ==
        schedules.end()) {
      schedules.push_back(schedule);
    }
  }
  for (engine::Schedule* schedule : schedules) {
    schedule->reduce_waiting(units);
  }
}

void set_requires_all_reduce(ModuleRef module, bool on) {
  for (const auto& unit : engine::units_in(module)) {
    unit->gradients().set_all_reduces(on);
  }
}

struct NoSync::Data {
  std::vector<std::shared_ptr<engine::Unit>> units; // those that it turned off
};

NoSync::NoSync(ModuleRef module) : data_(std::make_unique<Data>()) {
  for (const auto& unit : engine::units_in(module)) {
    if (unit->gradients().syncs()) {
      unit->gradients().set_syncs(false);
      data_->units.push_back(unit);
    }
  }
}

NoSync::~NoSync() {
  for (const auto& unit : data_->units) {
    unit->gradients().set_syncs(true);
  }
}

void recover(ModuleRef module) {
  for (const auto& unit : engine::units_in(module)) {
    unit->schedule().recover();
  }
}

} // namespace tessera
