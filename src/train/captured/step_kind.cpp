#include "train/captured/step_kind.h"

#include <tessera/optim/options.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

namespace tessera::train {
namespace {

/// Bytes of numbers, one after the other.
class KindBytes {
 public:
  template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void add(T value) {
    kind_.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
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
    kind_.bytes += text;
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
  /// What was added since the last part is `what`.
  void end_part(const char* what, bool is_option = false) {
    kind_.parts.push_back({what, is_option, kind_.bytes.size()});
  }
  StepKind take() {
    return std::move(kind_);
  }

 private:
  StepKind kind_;
};

void add_inputs(const std::vector<at::Tensor>& inputs, KindBytes& kind) {
  kind.add(inputs.size());
  for (const at::Tensor& input : inputs) {
    kind.add(input.defined());
    if (!input.defined()) {
      continue;
    }
    kind.add(input.sizes());
    kind.add(input.strides());
    kind.add(input.scalar_type());
    kind.add(input.device().type());
    kind.add(input.device().index());
    kind.add(input.requires_grad());
  }
  kind.end_part(kShapesOfInputs);
}

void add_model(const StepParts& parts, KindBytes& kind) {
  kind.add(parts.model.is_training());
  for (const auto& module : parts.modules) {
    kind.add(module->is_training());
  }
  kind.end_part("the mode of a module (train() or eval())");
  for (const auto& [name, param] : parts.params) {
    kind.add(param.requires_grad());
  }
  for (const at::Tensor& leaf : parts.leaves) {
    kind.add(leaf.requires_grad());
  }
  kind.end_part("requires_grad of a parameter");
  for (const at::Tensor& leaf : parts.leaves) {
    kind.add(leaf.grad().defined());
  }
  kind.end_part("which parameters have a gradient before the step");
  for (const auto& unit : parts.units) {
    kind.add(unit->gradients().syncs());
    kind.add(unit->gradients().all_reduces());
  }
  kind.end_part("whether gradients are reduced");
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
    kind.end_part(field.key, /*is_option=*/true);
  }
}

void add_optimizers(const OptimizerRefs& optimizers, KindBytes& kind) {
  for (const auto& optimizer : optimizers) {
    auto& groups = optimizer.get().param_groups();
    kind.add(groups.size());
    for (auto& group : groups) {
      kind.add(group.params().size());
    }
    kind.end_part("the number of parameters in a param group");
    for (auto& group : groups) {
      if (auto* own = dynamic_cast<optim::Options*>(&group.options())) {
        add_options(*own, kind);
      }
    }
  }
}

/// Of the whole process, as far as they can be read cheaply.
void add_switches(KindBytes& kind) {
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    kind.add(at::autocast::is_autocast_enabled(type));
    kind.add(at::autocast::get_autocast_dtype(type));
  }
  kind.add(at::GradMode::is_enabled());
  kind.end_part("autocast or grad mode");
  const at::Context& context = at::globalContext();
  kind.add(context.deterministicAlgorithms());
  kind.add(context.deterministicCuDNN());
  kind.add(context.benchmarkCuDNN());
  for (const auto op :
       {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN}) {
    kind.add(context.float32Precision(at::Float32Backend::CUDA, op));
  }
  kind.add(context.allowFP16ReductionCuBLAS());
  kind.add(context.allowBF16ReductionCuBLAS());
  kind.add(context.userEnabledFlashSDP());
  kind.add(context.userEnabledMemEfficientSDP());
  kind.add(context.userEnabledMathSDP());
  kind.add(context.userEnabledCuDNNSDP());
  kind.end_part("a global switch of LibTorch");
}

} // namespace

const StepKind::Part* StepKind::first_difference(const StepKind& other) const {
  size_t begin = 0;
  size_t others_begin = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t end = parts[i].end;
    const size_t others_end =
        i < other.parts.size() ? other.parts[i].end : other.bytes.size();
    const std::string_view mine(bytes.data() + begin, end - begin);
    const std::string_view others(
        other.bytes.data() + others_begin, others_end - others_begin);
    if (mine != others) {
      return &parts[i];
    }
    begin = end;
    others_begin = others_end;
  }
  return nullptr;
}

StepKind kind_of_step(
    const StepParts& parts,
    const std::vector<at::Tensor>& inputs) {
  KindBytes kind;
  add_inputs(inputs, kind);
  add_model(parts, kind);
  add_optimizers(parts.optimizers, kind);
  add_switches(kind);
  return kind.take();
}

} // namespace tessera::train
