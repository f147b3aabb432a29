#include "fsdp/fsdp_unit.h"

#include <utility>

#include "engine/module_units.h"
#include "engine/unit_memory.h"

namespace tessera {

FSDPUnit::FSDPUnit(
    std::shared_ptr<const Inner> inner,
    torch::nn::Module& module)
    : inner_(std::move(inner)), module_(&module) {}

const std::string& FSDPUnit::name() const {
  return inner_->unit->name();
}

bool FSDPUnit::is_root() const {
  return inner_->unit->is_root();
}

bool FSDPUnit::uses_sharded_strategy() const {
  return inner_->unit->groups().shard.size() > 1;
}

bool FSDPUnit::offloads_params() const {
  return inner_->unit->options().offload;
}

bool FSDPUnit::use_orig_params() const {
  return !inner_->unit->options().one_leaf;
}

at::Tensor FSDPUnit::flat_param() const {
  return inner_->unit->flat_param();
}

int64_t FSDPUnit::sharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : inner_->unit->bundles()) {
    numel += bundle.layout().shard_numel();
  }
  return numel;
}

int64_t FSDPUnit::unsharded_numel() const {
  int64_t numel = 0;
  for (const engine::Bundle& bundle : inner_->unit->bundles()) {
    numel += use_orig_params() ? bundle.layout().full_numel()
                               : bundle.layout().unpadded_numel();
  }
  return numel;
}

int64_t FSDPUnit::allocated_numel() const {
  return engine::allocated_numel(*inner_->unit);
}

std::vector<FSDPUnit> fsdp_units(ModuleRef module, bool root_only) {
  std::vector<FSDPUnit> result;
  const auto units = engine::units_in(module);
  const auto add = [&](torch::nn::Module& one) {
    for (const auto& unit : units) {
      if (unit->home() == &one && (!root_only || unit->is_root())) {
        result.emplace_back(
            std::make_shared<const FSDPUnit::Inner>(FSDPUnit::Inner{unit}),
            one);
      }
    }
  };
  add(module);
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    add(*item.value());
  }
  return result;
}

} // namespace tessera
