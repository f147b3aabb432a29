#include "exported/fold_constants.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "deferred/deferred_tensor.h"
#include "exported/autocast_guard.h"
#include "exported/graph_compiler.h"
#include "exported/memory_roots.h"
#include "exported/nested_steps.h"
#include "exported/result_bytes.h"
#include "exported/steps.h"

namespace tessera::exported {
namespace {

using c10::IValue;
using Values = std::vector<IValue>;

/// Whether the operator gives the same for the same arguments, and does nothing
/// else.
bool is_pure(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const auto begins_with = [&](std::string_view start) {
    return std::string_view(name).starts_with(start);
  };
  const bool is_excepted = begins_with("aten::empty") ||
      begins_with("aten::new_empty") || begins_with("aten::_empty");
  return begins_with("aten::") && !is_excepted &&
      !op.hasTag(at::Tag::nondeterministic_seeded);
}

/// A graph that is run once, where it stands.
NestedStep* plain_graph(Step& step) {
  const bool is_plain = dynamic_cast<GradModeStep*>(&step) != nullptr ||
      dynamic_cast<AutocastStep*>(&step) != nullptr ||
      dynamic_cast<PlainGraphStep*>(&step) != nullptr;
  return is_plain ? static_cast<NestedStep*>(&step) : nullptr;
}

/// Whether the graph is computed in a dtype that the caller chooses.
bool follows_caller(const Step& step) {
  const auto* autocast = dynamic_cast<const AutocastStep*>(&step);
  return autocast != nullptr && autocast->enabled && !autocast->dtype;
}

bool is_pure(Step& step) {
  if (writes_values(step) || follows_caller(step)) {
    return false;
  }
  if (const auto* call = dynamic_cast<const OperatorStep*>(&step)) {
    return is_pure(call->op);
  }
  if (NestedStep* nested = plain_graph(step)) {
    return std::all_of(
        nested->first.steps.begin(),
        nested->first.steps.end(),
        [](const auto& inner) { return is_pure(*inner); });
  }
  return dynamic_cast<const FunctionStep*>(&step) != nullptr;
}

/// Whether the elements are in memory as they are.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
      !tensor.is_conj() && !tensor.is_neg() && !tensor.requires_grad();
}

bool is_same(const at::Tensor& one, const at::Tensor& other) {
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.reshape({-1}).view(at::kByte);
  };
  return is_plain(one) && is_plain(other) &&
      one.scalar_type() == other.scalar_type() &&
      one.sizes() == other.sizes() && one.strides() == other.strides() &&
      at::equal(bits(one), bits(other));
}

bool is_same(const IValue& one, const IValue& other) {
  if (one.isTensor() && other.isTensor()) {
    return is_same(one.toTensor(), other.toTensor());
  }
  return (one.isNone() && other.isNone()) ||
      (one.isInt() && other.isInt() && one.toInt() == other.toInt()) ||
      (one.isBool() && other.isBool() && one.toBool() == other.toBool()) ||
      (one.isDouble() && other.isDouble() &&
       one.toDouble() == other.toDouble());
}

bool are_same(const Values& ones, const Values& others) {
  return std::equal(
      ones.begin(),
      ones.end(),
      others.begin(),
      others.end(),
      [](const IValue& one, const IValue& other) {
        return is_same(one, other);
      });
}

/// What the caller may have switched on around forward(): nothing, or autocast.
constexpr std::array<std::optional<at::ScalarType>, 3> kSurroundings{
    std::nullopt,
    at::kBFloat16,
    at::kHalf};

/// Folds one code.
class Folder {
 public:
  Folder(
      Code& code,
      const Graph& graph,
      const FoldingScope& scope,
      HeldMemory& memory)
      : code_(code),
        graph_(graph),
        scope_(scope),
        memory_(memory),
        run_scope_{scope.weights, nullptr},
        frame_(code, run_scope_),
        roots_(code) {}

  void fold() {
    unmark_last_uses(code_);
    std::vector<std::unique_ptr<Step>> stay;
    for (size_t i = 0; i < code_.steps.size(); ++i) {
      if (!try_to_fold(*code_.steps[i], i)) {
        stay.push_back(nullptr);
        stay.back().swap(code_.steps[i]);
      }
    }
    code_.steps = std::move(stay);
    for (const auto& step : code_.steps) {
      put_constants(*step);
    }
    mark_last_uses(code_);
  }

 private:
  bool is_known(const Source& source) const {
    switch (source.from) {
      case Source::From::Constant:
        return true;
      case Source::From::Weight:
        return scope_.is_fixed[source.index];
      default:
        return folded_.contains(source.index);
    }
  }
  bool is_known(const Operand& operand) const {
    return operand.form < Operand::Form::Tensors
        ? is_known(operand.source)
        : std::all_of(
              operand.elements.begin(),
              operand.elements.end(),
              [&](const Source& element) { return is_known(element); });
  }

  /// Whether the step is gone; its results are known then.
  bool try_to_fold(Step& step, size_t number) {
    const bool can_be = step.node != nullptr &&
        std::all_of(step.operands.begin(),
                    step.operands.end(),
                    [&](const Operand& operand) {
                      return is_known(operand);
                    }) &&
        is_pure(step) && !roots_.is_kept(number);
    const auto bytes = can_be ? result_bytes(*step.node, graph_) : std::nullopt;
    if (!bytes || *bytes > memory_.bytes_left()) {
      return false;
    }
    const auto results = results_in_all_surroundings(step);
    if (!results) {
      each_slot(step, [&](uint32_t slot) {
        frame_.set(static_cast<int32_t>(slot), IValue()); // it may be large
      });
      return false;
    }
    memory_.hold(*results);
    each_slot(step, [&](uint32_t slot) { folded_.try_emplace(slot); });
    return true;
  }

  /// Nothing if they differ, if they are too large, or if the step throws.
  std::optional<Values> results_in_all_surroundings(const Step& step) {
    std::optional<Values> first;
    try {
      for (const auto& autocast : kSurroundings) {
        Values results = results_of(step, autocast);
        if (!memory_.fits(results) || (first && !are_same(*first, results))) {
          return std::nullopt;
        }
        first = std::move(results);
      }
    } catch (const std::exception&) {
      return std::nullopt;
    }
    return first;
  }

  Values results_of(
      const Step& step,
      const std::optional<at::ScalarType>& autocast) {
    const AutocastGuard host(
        at::kCPU,
        autocast.has_value(),
        autocast.value_or(at::kBFloat16),
        false);
    const AutocastGuard device(
        scope_.device.type(),
        autocast.has_value(),
        autocast.value_or(at::kBFloat16),
        false);
    step.run(frame_);
    Values results;
    each_slot(step, [&](uint32_t slot) {
      results.push_back(frame_.take({Source::From::Slot, slot}));
    });
    return results;
  }

  template <class Use>
  static void each_slot(const Step& step, const Use& use) {
    for (const Result& result : step.results) {
      for (const int32_t slot : result.slots) {
        if (slot != Result::kDropped) {
          use(static_cast<uint32_t>(slot));
        }
      }
    }
  }

  uint32_t constant(IValue value) {
    code_.constants.push_back(std::move(value));
    return static_cast<uint32_t>(code_.constants.size() - 1);
  }

  void put_constant(Source& source) {
    if (source.from != Source::From::Slot) {
      return;
    }
    const auto found = folded_.find(source.index);
    if (found == folded_.end()) {
      return;
    }
    auto& index = found->second;
    if (!index) {
      index = constant(frame_.take(source));
    }
    source = {Source::From::Constant, *index};
  }

  void put_constants(Step& step) {
    NestedStep* nested = plain_graph(step);
    const bool has_graphs = !step.nested().empty();
    for (Operand& operand : step.operands) {
      put_constant(operand.source);
      for (Source& element : operand.elements) {
        put_constant(element);
      }
      const bool is_list = operand.form >= Operand::Form::Tensors;
      const bool is_constant = is_list
          ? std::all_of(
                operand.elements.begin(),
                operand.elements.end(),
                [](const Source& element) {
                  return element.from == Source::From::Constant;
                })
          : operand.source.from == Source::From::Constant;
      // Graphs take the elements of lists, not lists.
      if (is_constant && operand.form != Operand::Form::Value && !has_graphs) {
        const uint32_t index = constant(frame_.take(operand));
        operand = {
            .form = Operand::Form::Value,
            .source = {Source::From::Constant, index},
            .elements = {}};
      }
    }
    if (nested != nullptr && step.node != nullptr) {
      pass_constants(*nested);
      if (const Graph* graph = graph_in(*step.node)) {
        Folder(nested->first, *graph, scope_, memory_).fold();
      }
    }
  }

  /// What a graph is given is a constant of the graph, if it is one here.
  void pass_constants(NestedStep& step) {
    size_t input = 0;
    const auto pass = [&](const Source& source) {
      int32_t& slot = step.first.inputs[input++];
      if (source.from != Source::From::Constant || slot == Result::kDropped) {
        return;
      }
      step.first.constants.push_back(code_.constants[source.index]);
      const Source inside{
          Source::From::Constant,
          static_cast<uint32_t>(step.first.constants.size() - 1)};
      replace(step.first, static_cast<uint32_t>(slot), inside);
      slot = Result::kDropped;
    };
    for (const Operand& operand : step.operands) {
      if (operand.form < Operand::Form::Tensors) {
        pass(operand.source);
      } else {
        std::for_each(operand.elements.begin(), operand.elements.end(), pass);
      }
    }
  }

  static void replace(Code& code, uint32_t slot, const Source& by) {
    unmark_last_uses(code);
    const auto put = [&](std::vector<Operand>& operands) {
      for (Operand& operand : operands) {
        for (Source* source : sources_of(operand)) {
          if (source->from == Source::From::Slot && source->index == slot) {
            *source = by;
          }
        }
      }
    };
    for (const auto& step : code.steps) {
      put(step->operands);
    }
    put(code.outputs);
    mark_last_uses(code);
  }

  static std::vector<Source*> sources_of(Operand& operand) {
    std::vector<Source*> sources{&operand.source};
    for (Source& element : operand.elements) {
      sources.push_back(&element);
    }
    return sources;
  }

  Code& code_;
  const Graph& graph_;
  const FoldingScope& scope_;
  HeldMemory& memory_;
  const RunScope run_scope_;
  Frame frame_;
  const MemoryRoots roots_;
  /// Slots whose values are known, with their constants, if any step that stays
  /// reads them.
  std::unordered_map<uint32_t, std::optional<uint32_t>> folded_;
};

} // namespace

void fold_constants(Code& code, const Graph& graph, const FoldingScope& scope) {
  if (scope.device.is_meta()) {
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(deferred::kDeferredKey);
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> fixed;
  for (size_t i = 0; i < scope.weights->size(); ++i) {
    if (scope.is_fixed[i]) {
      fixed.push_back((*scope.weights)[i]);
    }
  }
  HeldMemory memory(fixed);
  Folder(code, graph, scope, memory).fold();
}

size_t num_steps(const Code& code) {
  size_t result = code.steps.size();
  for (const auto& step : code.steps) {
    for (const Code* inside : step->nested()) {
      result += num_steps(*inside);
    }
  }
  return result;
}

} // namespace tessera::exported
