#include <tessera/comm/agree.h>
#include <tessera/error.h>
#include <tessera/fsdp/summon.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "comm/group/group_impl.h"
#include "engine/module_units.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/open_forwards.h"
#include "libtorch/backward_hooks.h"

namespace tessera {
namespace {

using engine::Unit;
using Units = std::vector<std::shared_ptr<Unit>>;

Units units_to_summon(const torch::nn::Module& module, bool recurse) {
  Units units = engine::units_in(module);
  std::erase_if(units, [&](const auto& unit) {
    return unit->bundles().empty() || (!recurse && unit->home() != &module);
  });
  return units;
}

template <class E = c10::NotImplementedError>
[[noreturn]] void refuse(const Unit& unit, const std::string& what) {
  raise<E>({.call = "summon_full_params", .unit = unit.name()}, what);
}

/// Checks what a rank can see by itself.
void check_moment(const Units& units) {
  for (const auto& unit : units) {
    if (libtorch::in_backward() || fsdp::in_forward(*unit)) {
      refuse<c10::Error>(
          *unit,
          "Cannot manually unshard parameters during forward/backward. Do it between steps.");
    }
    if (unit->state() == engine::UnitState::Summoned) {
      refuse<c10::Error>(
          *unit,
          "Cannot manually unshard parameters when already unsharding parameters. Close the other guard first.");
    }
  }
}

/// Checks with the same result on all ranks, once ranks agree on the options.
void check_options(const Units& units, const SummonOptions& options) {
  for (const auto& unit : units) {
    if (options.writeback() && options.rank0_only()) {
      refuse(
          *unit,
          "writeback=True and rank0_only=True is not supported yet: the other ranks have nothing to write back. Use writeback(false).");
    }
    if (options.offload_to_cpu() && unit->groups().shard.size() == 1) {
      refuse(
          *unit,
          "offload_to_cpu=True and NO_SHARD is not supported yet. The parameters are whole already: copy them.");
    }
    if (options.with_grads() &&
        (options.offload_to_cpu() || unit->options().one_leaf)) {
      refuse(
          *unit,
          fmt::format(
              "with_grads=True, use_orig_params={}, offload_to_cpu={} is not supported yet.",
              unit->options().one_leaf ? "False" : "True",
              options.offload_to_cpu() ? "True" : "False"));
    }
  }
}

void agree_on(const Units& units, const SummonOptions& options) {
  const std::string line = fmt::format(
      "writeback {}, rank0_only {}, offload_to_cpu {}, with_grads {}, {} units",
      options.writeback(),
      options.rank0_only(),
      options.offload_to_cpu(),
      options.with_grads(),
      units.size());
  std::vector<const Group::Impl*> asked;
  for (const auto& unit : units) {
    const Group& group = unit->groups().all;
    if (std::find(asked.begin(), asked.end(), &group.impl()) == asked.end()) {
      asked.push_back(&group.impl());
      agree(group, "summon_full_params", {line});
    }
  }
}

} // namespace

struct SummonGuard::Data {
  Units units; // summoned ones
};

SummonGuard::SummonGuard(std::unique_ptr<Data> data) : data_(std::move(data)) {}

SummonGuard::SummonGuard(SummonGuard&& other) noexcept = default;

SummonGuard::~SummonGuard() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(
        "summon_full_params could not be closed, and changes may be lost: ",
        error.what());
  }
}

void SummonGuard::close() {
  if (!data_) {
    return;
  }
  const auto data = std::move(data_);
  std::exception_ptr failure;
  for (const auto& unit : data->units) {
    try {
      unit->schedule().end_summon(*unit);
    } catch (...) { // the others must not stay summoned
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

SummonGuard summon_full_params(ModuleRef module, const SummonOptions& options) {
  const Units units = units_to_summon(module, options.recurse());
  check_moment(units);
  agree_on(units, options);
  check_options(units, options);
  if (options.offload_to_cpu() && !options.rank0_only() && !units.empty()) {
    TORCH_WARN_ONCE(
        "summon_full_params(offload_to_cpu) without rank0_only puts a copy of all parameters into host memory for each rank of the host.");
  }
  SummonGuard guard(std::make_unique<SummonGuard::Data>());
  for (const auto& unit : units) {
    unit->schedule().summon(
        *unit,
        {.writeback = options.writeback(),
         .rank0_only = options.rank0_only(),
         .offload_to_cpu = options.offload_to_cpu(),
         .with_grads = options.with_grads()});
    guard.data_->units.push_back(unit);
  }
  return guard;
}

} // namespace tessera
