#include "exported/memory_roots.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>

#include "exported/steps.h"

namespace tessera::exported {
namespace {

/// Operators whose results share memory with arguments, although their schemas
/// do not say so.
constexpr std::array<std::string_view, 4> kHiddenViews{
    "aten::_unsafe_view",
    "aten::lift",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes"};

/// Operands whose memory a result may share.
std::vector<const Operand*> shared_operands(Step& step) {
  std::vector<const Operand*> result;
  if (hides_views(step) || !step.nested().empty()) {
    for (const Operand& operand : step.operands) {
      result.push_back(&operand);
    }
    return result;
  }
  for (const size_t index : step.shared) {
    result.push_back(&step.operands[index]);
  }
  return result;
}

bool graphs_write_inputs(Step& step) {
  const auto codes = step.nested();
  return std::any_of(codes.begin(), codes.end(), [](const Code* code) {
    return MemoryRoots(*code).writes_inputs();
  });
}

} // namespace

bool hides_views(const Step& step) {
  const auto* call = dynamic_cast<const OperatorStep*>(&step);
  return call != nullptr &&
      (call->op.hasKernelForDispatchKey(
           c10::DispatchKey::CompositeImplicitAutograd) ||
       std::find(
           kHiddenViews.begin(),
           kHiddenViews.end(),
           call->op.schema().name()) != kHiddenViews.end());
}

bool writes_values(const Step& step) {
  const auto* call = dynamic_cast<const OperatorStep*>(&step);
  return !step.written.empty() &&
      (call == nullptr || call->op.schema().name() != "aten::detach_");
}

void MemoryRoots::Values::add(const Source& source) {
  if (source.from == Source::From::Weight) {
    weights.insert(source.index);
  } else if (source.from != Source::From::Constant) {
    slots[source.index] = true;
  }
}

void MemoryRoots::Values::add(const Operand& operand) {
  add(operand.source);
  for (const Source& element : operand.elements) {
    add(element);
  }
}

void MemoryRoots::Values::add_results(const Step& step) {
  for (const Result& result : step.results) {
    for (const int32_t slot : result.slots) {
      if (slot != Result::kDropped) {
        slots[static_cast<size_t>(slot)] = true;
      }
    }
  }
}

bool MemoryRoots::Values::contains(const Source& source) const {
  switch (source.from) {
    case Source::From::Constant:
      return false;
    case Source::From::Weight:
      return weights.contains(source.index);
    default:
      return slots[source.index];
  }
}

bool MemoryRoots::Values::contains(const Operand& operand) const {
  return contains(operand.source) ||
      std::any_of(
             operand.elements.begin(),
             operand.elements.end(),
             [&](const Source& element) { return contains(element); });
}

bool MemoryRoots::Values::contains_result(const Step& step) const {
  for (const Result& result : step.results) {
    for (const int32_t slot : result.slots) {
      if (slot != Result::kDropped && slots[static_cast<size_t>(slot)]) {
        return true;
      }
    }
  }
  return false;
}

MemoryRoots::MemoryRoots(const Code& code) : kept_(code.steps.size()) {
  for (Values* values : {&written_, &returned_, &touched_}) {
    values->slots.resize(code.num_slots);
  }
  for (const Operand& output : code.outputs) {
    returned_.add(output);
  }
  for (size_t i = code.steps.size(); i-- > 0;) {
    go_back(*code.steps[i], i);
  }
  touched_.weights = written_.weights;
  for (size_t i = 0; i < code.steps.size(); ++i) {
    go_on(*code.steps[i], i);
  }
  writes_inputs_ =
      std::any_of(code.inputs.begin(), code.inputs.end(), [&](int32_t slot) {
        return slot != Result::kDropped &&
            written_.slots[static_cast<size_t>(slot)];
      });
}

/// From the results of a step to its operands.
void MemoryRoots::go_back(Step& step, size_t number) {
  if (writes_values(step)) {
    for (const size_t index : step.written) {
      written_.add(step.operands[index]);
    }
  }
  const bool is_written =
      written_.contains_result(step) || graphs_write_inputs(step);
  const bool is_returned = returned_.contains_result(step);
  if (!is_written && !is_returned) {
    return;
  }
  kept_[number] = true;
  for (const Operand* operand : shared_operands(step)) {
    if (is_written) {
      written_.add(*operand);
    }
    if (is_returned) {
      returned_.add(*operand);
    }
  }
  if (is_written) {
    touched_.add_results(step);
  }
}

/// From the operands of a step to its results.
void MemoryRoots::go_on(Step& step, size_t number) {
  const auto operands = shared_operands(step);
  const bool is_touched =
      std::any_of(operands.begin(), operands.end(), [&](const Operand* each) {
        return touched_.contains(*each);
      });
  if (is_touched) {
    kept_[number] = true;
    touched_.add_results(step);
  }
}

std::vector<bool> fixed_weights(
    const std::vector<WeightSpec>& specs,
    const std::vector<at::Tensor>& weights,
    const std::vector<const Code*>& codes) {
  std::set<uint32_t> written;
  for (const Code* code : codes) {
    written.merge(std::set(MemoryRoots(*code).written_weights()));
  }
  const auto storage_of = [&](size_t weight) {
    return weights[weight].storage().unsafeGetStorageImpl();
  };
  std::unordered_set<const c10::StorageImpl*> changing;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].kind != WeightSpec::Kind::Constant ||
        written.contains(static_cast<uint32_t>(i))) {
      changing.insert(storage_of(i));
    }
  }
  std::vector<bool> result;
  for (size_t i = 0; i < specs.size(); ++i) {
    result.push_back(!changing.contains(storage_of(i)));
  }
  return result;
}

} // namespace tessera::exported
