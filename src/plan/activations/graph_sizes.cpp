#include "plan/activations/graph_sizes.h"

#include <algorithm>
#include <set>
#include <variant>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

using exported::Expression;
using exported::Program;
using exported::TensorMeta;

void add_symbols(
    const exported::Graph& graph,
    exported::SymbolValues& symbols) {
  const auto add = [&](const Expression<int64_t>& size) {
    const auto symbol = exported::symbol_of(size);
    if (symbol && size.at_export) {
      symbols.emplace(*symbol, *size.at_export);
    }
  };
  for (const auto& [name, meta] : graph.tensors) {
    for (const auto& size : meta.sizes) {
      add(size);
    }
  }
  for (const auto& [name, number] : graph.ints) {
    add(number);
  }
}

/// The symbols that are this dimension of an input.
std::set<std::string> symbols_of_inputs(const Program& program, size_t dim) {
  std::set<std::string> found;
  for (const exported::InputSpec& input : program.inputs) {
    const auto* user = std::get_if<exported::UserInput>(&input);
    const auto* tensor = user == nullptr
        ? nullptr
        : std::get_if<exported::TensorName>(&user->argument.value);
    if (tensor == nullptr) {
      continue;
    }
    const auto meta = program.graph.tensors.find(tensor->name);
    if (meta != program.graph.tensors.end() &&
        dim < meta->second.sizes.size()) {
      if (const auto symbol = exported::symbol_of(meta->second.sizes[dim])) {
        found.insert(*symbol);
      }
    }
  }
  return found;
}

/// Where the range is open.
constexpr int64_t kLargestBatch = int64_t{1} << 40;

} // namespace

BatchRange batch_range(const Program& program) {
  BatchRange result{.least = 1, .most = kLargestBatch};
  for (const std::string& symbol : symbols_of_inputs(program, 0)) {
    const auto range = program.ranges.find(symbol);
    if (range != program.ranges.end()) {
      result.least = std::max(result.least, range->second.min.value_or(1));
      result.most =
          std::min(result.most, range->second.max.value_or(kLargestBatch));
    }
  }
  return result;
}

GraphSizes::GraphSizes(const Program& program, const InputSizes& inputs) {
  add_symbols(program.graph, symbols_);
  set(program, "--batch", 0, inputs.batch, chosen_.batch);
  set(program, "--length", 1, inputs.length, chosen_.length);
}

void GraphSizes::set(
    const Program& program,
    const char* flag,
    size_t dim,
    std::optional<int64_t> wanted,
    std::optional<int64_t>& chosen) {
  const auto symbols = symbols_of_inputs(program, dim);
  const std::string name = flag;
  if (wanted && symbols.empty()) {
    throw PlanError(
        name +
        ": the program was exported for one size of this dimension of its inputs. Export it with dynamic_shapes, or leave the flag out.");
  }
  for (const std::string& symbol : symbols) {
    const auto range = program.ranges.find(symbol);
    if (wanted && range != program.ranges.end()) {
      const int64_t least = range->second.min.value_or(1);
      const int64_t most = range->second.max.value_or(INT64_MAX);
      if (*wanted < least || *wanted > most) {
        throw PlanError(
            name + " is " + std::to_string(*wanted) +
            ": the program was exported for " + std::to_string(least) + " to " +
            std::to_string(most) + ".");
      }
    }
    if (wanted) {
      symbols_[symbol] = *wanted;
    }
    if (const auto known = symbols_.find(symbol); known != symbols_.end()) {
      chosen = known->second;
    }
  }
}

TensorShape GraphSizes::shape_of(const TensorMeta& meta) const {
  TensorShape shape{.sizes = {}, .strides = {}, .dtype = meta.dtype};
  for (const auto& size : meta.sizes) {
    shape.sizes.push_back(exported::evaluate(size, symbols_));
    if (shape.sizes.back() < 0) {
      throw exported::UnknownSize("a tensor has a negative size");
    }
  }
  for (const auto& stride : meta.strides) {
    shape.strides.push_back(exported::evaluate(stride, symbols_));
  }
  return shape;
}

} // namespace tessera::plan
