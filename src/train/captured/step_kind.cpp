#include "train/captured/step_kind.h"

#include <tessera/optim/optimizer.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/fnv.h"
#include "engine/module_units.h"
#include "engine/parameters.h"

namespace tessera::train {
namespace {

/// Bytes of numbers, one after the other.
class KindBytes {
 public:
  template <class T>
  requires(std::is_arithmetic_v<T>) void add(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <class T>
  void add(const std::optional<T>& value) {
    add(value.has_value());
    if (value) {
      add(*value);
    }
  }
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  template <class... Numbers>
  void add(const std::tuple<Numbers...>& numbers) {
    std::apply(
        [this](const auto&... number) { (this->add(number), ...); }, numbers);
  }
  void add(at::IntArrayRef numbers) {
    add(numbers.size());
    for (const int64_t number : numbers) {
      add(number);
    }
  }
  std::string take() {
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

void add_input(const at::Tensor& input, KindBytes& kind) {
  kind.add(input.defined());
  if (!input.defined()) {
    return;
  }
  kind.add(input.sizes());
  kind.add(input.strides());
  kind.add(static_cast<int>(input.scalar_type()));
  kind.add(static_cast<int>(input.device().type()));
  kind.add(input.device().index());
  kind.add(input.requires_grad());
}

/// All but the learning rate, which kernels read on the device.
void add_options(optim::Options& options, KindBytes& kind) {
  for (const optim::OptionField& field : options.fields()) {
    if (std::string_view(field.key) == "lr") {
      continue;
    }
    std::visit(
        [&](const auto& slot) {
          if constexpr (std::is_pointer_v<std::decay_t<decltype(slot)>>) {
            kind.add(*slot);
          }
        },
        field.slot);
  }
}

uint64_t place_of(const at::Tensor& tensor) {
  // Without looking at the bytes, which may be shared until they are written.
  return !tensor.defined() || !tensor.has_storage()
      ? 0
      : reinterpret_cast<uint64_t>(
            tensor.storage().unsafeGetStorageImpl()->data()) +
          static_cast<uint64_t>(tensor.storage_offset());
}

std::vector<at::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) {
    tensors.push_back(tensor);
  }
  return tensors;
}

} // namespace

StepParts::StepParts(torch::nn::Module& module, OptimizerRefs all)
    : model(module),
      optimizers(std::move(all)),
      modules(module.modules(/*include_self=*/false)),
      units(engine::units_in(module)),
      params(module.parameters()),
      leaves(tensors_of(engine::list_parameters(module))),
      buffers(module.buffers()) {}

std::vector<ddp::Reducer*> StepParts::reducers() const {
  std::vector<ddp::Reducer*> found;
  for (ddp::Reducer* reducer : ddp::Reducer::all()) {
    const bool is_used =
        std::any_of(params.begin(), params.end(), [&](const auto& param) {
          return reducer->reduces(param);
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

torch::optim::Optimizer& stepping_part(torch::optim::Optimizer& optimizer) {
  auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(&optimizer);
  return zero == nullptr ? optimizer : zero->optim();
}

std::string kind_of_step(
    const StepParts& parts,
    const std::vector<at::Tensor>& inputs) {
  KindBytes kind;
  kind.add(inputs.size());
  for (const at::Tensor& input : inputs) {
    add_input(input, kind);
  }
  kind.add(parts.model.is_training());
  for (const auto& module : parts.modules) {
    kind.add(module->is_training());
  }
  for (const at::Tensor& param : parts.params) {
    kind.add(param.requires_grad());
  }
  for (const at::Tensor& leaf : parts.leaves) {
    kind.add(leaf.requires_grad());
    kind.add(leaf.grad().defined());
  }
  for (const auto& unit : parts.units) {
    kind.add(unit->gradients().syncs());
    kind.add(unit->gradients().all_reduces());
  }
  for (const auto& optimizer : parts.optimizers) {
    auto& groups = optimizer.get().param_groups();
    kind.add(groups.size());
    for (auto& group : groups) {
      kind.add(group.params().size());
      if (auto* own = dynamic_cast<optim::Options*>(&group.options())) {
        add_options(*own, kind);
      }
    }
  }
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    kind.add(at::autocast::is_autocast_enabled(type));
    kind.add(static_cast<int>(at::autocast::get_autocast_dtype(type)));
  }
  kind.add(at::GradMode::is_enabled());
  kind.add(at::globalContext().deterministicAlgorithms());
  return kind.take();
}

uint64_t places_of(const StepParts& parts) {
  uint64_t digest = kFnvStart;
  const auto mix = [&](const at::Tensor& tensor) {
    digest = mix_digest(digest, place_of(tensor));
  };
  for (const at::Tensor& leaf : parts.leaves) {
    mix(leaf);
  }
  for (const at::Tensor& buffer : parts.buffers) {
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
