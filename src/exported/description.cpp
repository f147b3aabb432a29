// What a program takes and returns, in words of the public interface.
#include <tessera/exported/exported.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "exported/loaded_model.h"
#include "exported/operator_name.h"
#include "exported/pytree.h"

namespace tessera::exported {
namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

/// The sizes that `factor * symbol + offset` may have.
ExportedSpec::Size described_range(
    const Range& range,
    const Formula::Linear& linear) {
  const auto at = [&](int64_t value) {
    return checked_add(checked_mul(linear.factor, value), linear.offset);
  };
  // Bounds that no size reaches stand for none.
  constexpr int64_t kLarge = int64_t{1} << 40;
  const int64_t least = range.min.value_or(0);
  if (linear.factor < 0) { // falls where the symbol rises
    const bool is_bound = range.max && *range.max < kLarge;
    return {is_bound ? at(*range.max) : 0, at(least)};
  }
  const bool is_bound =
      range.max && *range.max < kLarge && linear.factor < kLarge;
  return {at(least), is_bound ? at(*range.max) : kAny};
}

ExportedSpec::Size described_size(
    const Expression<int64_t>& size,
    const Program& program) {
  if (const auto* written = std::get_if<int64_t>(&size.value)) {
    return {*written, *written};
  }
  std::vector<std::string> symbols;
  const auto number = [&](const std::string& name) {
    const auto found = std::find(symbols.begin(), symbols.end(), name);
    const auto index = static_cast<size_t>(found - symbols.begin());
    if (found == symbols.end()) {
      symbols.push_back(name);
    }
    return std::optional(index);
  };
  try {
    const auto linear =
        Formula::parse(
            std::get<std::string>(size.value), {.symbol = number, .input = {}})
            .linear();
    const auto range = linear ? program.ranges.find(symbols[linear->symbol])
                              : program.ranges.end();
    if (linear) {
      return described_range(
          range == program.ranges.end() ? Range() : range->second, *linear);
    }
  } catch (const UnknownFormula&) { // of a result: nothing depends on it
  } catch (const c10::Error&) { // beyond 64 bits
  }
  return {0, kAny};
}

void describe_tensor(
    const std::string& graph_name,
    const Program& program,
    ExportedSpec& spec) {
  const TensorMeta& meta = program.graph.tensors.at(graph_name);
  spec.kind = ExportedValue::Kind::Tensor;
  spec.dtype = to_scalar_type(meta.dtype);
  for (const auto& size : meta.sizes) {
    spec.sizes.push_back(described_size(size, program));
  }
}

/// "['logits'][0]" is "logits[0]", "[0]" is "0".
std::string result_name(const std::string& leaf) {
  if (leaf.starts_with("['")) {
    const size_t end = leaf.find("']");
    return leaf.substr(2, end - 2) + leaf.substr(end + 2);
  }
  if (leaf.starts_with("[")) {
    const size_t end = leaf.find(']');
    return leaf.substr(1, end - 1) + leaf.substr(end + 1);
  }
  return leaf;
}

ExportedValue::Kind described_kind(Leaf::Kind kind) {
  switch (kind) {
    case Leaf::Kind::Int:
      return ExportedValue::Kind::Int;
    case Leaf::Kind::Float:
      return ExportedValue::Kind::Float;
    case Leaf::Kind::Bool:
      return ExportedValue::Kind::Bool;
    default:
      return ExportedValue::Kind::Tensor;
  }
}

} // namespace

std::vector<ExportedSpec> Model::inputs(bool is_training) const {
  const ModelProgram& chosen = program_for(is_training);
  std::vector<std::string> graph_names(chosen.signature.leaves().size());
  for (const InputSpec& input : chosen.program.inputs) {
    const auto* user = std::get_if<UserInput>(&input);
    const auto* tensor = user == nullptr
        ? nullptr
        : std::get_if<TensorName>(&user->argument.value);
    if (tensor != nullptr) {
      graph_names[chosen.signature.leaf_at(tensor->name)] = tensor->name;
    }
  }
  std::vector<ExportedSpec> specs;
  for (size_t i = 0; i < graph_names.size(); ++i) {
    const Leaf& leaf = chosen.signature.leaves()[i];
    if (leaf.kind == Leaf::Kind::Fixed) {
      continue;
    }
    ExportedSpec& spec = specs.emplace_back();
    spec.name = leaf.name;
    spec.kind = described_kind(leaf.kind);
    if (leaf.kind == Leaf::Kind::Tensor) {
      describe_tensor(graph_names[i], chosen.program, spec);
    }
  }
  return specs;
}

std::vector<ExportedSpec> Model::results(bool is_training) const {
  const ModelProgram& chosen = program_for(is_training);
  std::vector<std::string> names;
  leaf_names(chosen.signature.outputs(), "", names);
  std::vector<ExportedSpec> specs;
  size_t next = 0;
  for (const OutputSpec& output : chosen.program.outputs) {
    if (output.kind != OutputSpec::Kind::User &&
        output.kind != OutputSpec::Kind::Loss) {
      continue;
    }
    const std::string& name = names.at(next++);
    if (const auto* tensor = std::get_if<TensorName>(&output.argument.value)) {
      ExportedSpec& spec = specs.emplace_back();
      spec.name = result_name(name);
      describe_tensor(tensor->name, chosen.program, spec);
    }
  }
  return specs;
}

} // namespace tessera::exported
