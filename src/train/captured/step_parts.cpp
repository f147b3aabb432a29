#include "train/captured/step_parts.h"

#include <tessera/engine/parameters.h>
#include <tessera/optim/optimizer.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/fnv.h"
#include "engine/list_parameters.h"
#include "engine/module_units.h"
#include "engine/owners.h"

namespace tessera::train {
namespace {

template <class Named>
NamedTensors listed(const Named& named) {
  NamedTensors list;
  for (const auto& item : named) {
    list.emplace_back(item.key(), item.value());
  }
  return list;
}

std::vector<at::Tensor> leaves_of(
    torch::nn::Module& module,
    const OptimizerRefs& optimizers) {
  std::vector<at::Tensor> leaves;
  std::unordered_set<const c10::TensorImpl*> known;
  const auto add = [&](const at::Tensor& leaf) {
    if (leaf.defined() && known.insert(leaf.unsafeGetTensorImpl()).second) {
      leaves.push_back(leaf);
    }
  };
  for (const auto& [name, leaf] : engine::list_parameters(module)) {
    add(leaf);
  }
  for (const auto& optimizer : optimizers) {
    for (const auto& group : optimizer.get().param_groups()) {
      std::for_each(group.params().begin(), group.params().end(), add);
    }
  }
  return leaves;
}

/// The name of one of `before` that is another tensor now. Later ones, which a
/// module makes when it is used, may come.
template <class Named>
const std::string* first_replaced(
    const NamedTensors& before,
    const Named& now) {
  for (const auto& [name, tensor] : before) {
    const at::Tensor* found = now.find(name);
    if (found == nullptr || !found->is_same(tensor)) {
      return &name;
    }
  }
  return nullptr;
}

uint64_t place_of(const at::Tensor& tensor) {
  // Without looking at the bytes, which may be shared until they are written.
  return !tensor.defined() || !tensor.has_storage()
      ? 0
      : reinterpret_cast<uint64_t>(
            tensor.storage().unsafeGetStorageImpl()->data()) +
          static_cast<uint64_t>(tensor.storage_offset()) *
              tensor.element_size();
}

/// Storages are compared by identity: to ask whether memory is shared is raw
/// access, which a sharded parameter refuses.
bool lies_in(const at::Tensor& tensor, const at::Tensor& other) {
  return other.defined() && other.has_storage() && tensor.has_storage() &&
      engine::storage_of(tensor) == engine::storage_of(other);
}

} // namespace

StepParts::StepParts(torch::nn::Module& module, OptimizerRefs all)
    : model(module),
      optimizers(std::move(all)),
      modules(module.modules(/*include_self=*/false)),
      units(engine::units_in(module)),
      params(listed(module.named_parameters())),
      buffers(listed(module.named_buffers())),
      leaves(leaves_of(module, optimizers)) {}

at::Device StepParts::device() const {
  for (const auto& unit : units) {
    for (const engine::Bundle& bundle : unit->bundles()) {
      return bundle.full().device();
    }
  }
  return params.empty() ? at::Device(at::kCPU) : params.front().second.device();
}

std::vector<ddp::Reducer*> StepParts::reducers() const {
  std::vector<ddp::Reducer*> found;
  for (ddp::Reducer* reducer : ddp::Reducer::all()) {
    const bool is_used =
        std::any_of(leaves.begin(), leaves.end(), [&](const auto& leaf) {
          return reducer->reduces(leaf);
        });
    if (is_used) {
      found.push_back(reducer);
    }
  }
  return found;
}

std::vector<Group> StepParts::groups() const {
  std::vector<Group> found;
  const auto add = [&](const Group& group) {
    const bool is_known =
        std::any_of(found.begin(), found.end(), [&](const Group& known) {
          return known.global_ranks() == group.global_ranks();
        });
    if (group.size() > 1 && !is_known) {
      found.push_back(group);
    }
  };
  for (const auto& unit : units) {
    add(unit->groups().all);
  }
  for (const ddp::Reducer* reducer : reducers()) {
    add(reducer->group());
  }
  for (const auto& optimizer : optimizers) {
    if (auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(&optimizer.get())) {
      add(zero->join_process_group());
    }
  }
  return found;
}

std::string StepParts::replaced() const {
  if (const auto* name = first_replaced(buffers, model.named_buffers())) {
    return fmt::format("buffer \"{}\"", *name);
  }
  if (const auto* name = first_replaced(params, model.named_parameters())) {
    return fmt::format("parameter \"{}\"", *name);
  }
  return "";
}

at::Tensor StepParts::result_of(const at::Tensor& output) const {
  if (!output.defined()) {
    return output;
  }
  const auto is_inside = [&](const auto& named) {
    return lies_in(output, named.second);
  };
  const bool is_part = std::any_of(params.begin(), params.end(), is_inside) ||
      std::any_of(buffers.begin(), buffers.end(), is_inside) ||
      std::any_of(leaves.begin(), leaves.end(), [&](const at::Tensor& leaf) {
                         return lies_in(output, leaf);
                       });
  return is_part ? output.detach().clone() : output.detach();
}

torch::optim::Optimizer& stepping_part(torch::optim::Optimizer& optimizer) {
  auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(&optimizer);
  return zero == nullptr ? optimizer : zero->optim();
}

uint64_t places_of(const StepParts& parts) {
  uint64_t digest = kFnvStart;
  const auto mix = [&](const at::Tensor& tensor) {
    digest = mix_digest(digest, place_of(tensor));
  };
  for (const at::Tensor& leaf : parts.leaves) {
    mix(leaf);
  }
  for (const auto& [name, buffer] : parts.buffers) {
    mix(buffer);
  }
  for (const auto& optimizer : parts.optimizers) {
    auto& stepping = stepping_part(optimizer);
    for (auto& group : stepping.param_groups()) {
      for (const at::Tensor& param : group.params()) {
        mix(param);
        const auto found = stepping.state().find(param.unsafeGetTensorImpl());
        if (found == stepping.state().end()) {
          continue;
        }
        const auto* state =
            dynamic_cast<const optim::ParamState*>(found->second.get());
        if (state == nullptr) {
          continue;
        }
        for (const auto& [name, value] : state->values) {
          if (value.is_tensor()) {
            mix(value.tensor());
          }
        }
      }
    }
  }
  return digest;
}

} // namespace tessera::train
