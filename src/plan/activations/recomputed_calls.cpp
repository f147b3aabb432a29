#include "plan/activations/recomputed_calls.h"

#include <set>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// The state of the CPU's random number generator, which recompute() keeps.
constexpr int64_t kRandomStateBytes = 5056;

} // namespace

std::shared_ptr<RecomputedCalls::Part> RecomputedCalls::part_of(
    const CallRange& call,
    const Names& names) const {
  const auto part =
      std::make_shared<Part>(Part{.call = call, .inputs = {}, .outputs = {}});
  if (run_.device() == Device::Cpu) {
    part->state_bytes = kRandomStateBytes;
  }
  std::set<std::string> known;
  for (size_t i = call.begin; i < call.end; ++i) {
    for (const std::string& name : names_read(graph_.nodes[i])) {
      const auto found = names.find(name);
      if (found != names.end() && known.insert(name).second) {
        part->inputs.emplace_back(name, found->second);
        const Value& value = tape_.at(found->second);
        if (value.is_buffer && changed_.contains(name)) {
          part->state_bytes = plus(part->state_bytes, value.shape.bytes());
        }
      }
    }
    for (std::string& name : names_given(graph_.nodes[i])) {
      known.insert(std::move(name));
    }
  }
  return part;
}

void RecomputedCalls::run(const CallRange& call, Names& names) {
  const auto part = part_of(call, names);
  const ValueId state = add_state(*part);
  std::vector<GradNode> before = tape_.begin_part();
  Names inside;
  run_cut(*part, inside);
  tape_.drop(tape_.end_part(std::move(before)));
  for (const auto& [name, value] : part->inputs) {
    run_.let_go(inside, name);
  }
  record(part, state, inside, names);
  for (const auto& [name, value] : part->inputs) {
    const auto read = last_.find(name);
    if (read != last_.end() && read->second < call.end) {
      run_.let_go(names, name);
    }
  }
  run_.let_go(inside);
  tape_.heap.release(tape_.at(state).block);
}

std::vector<RecomputedCalls::Cut> RecomputedCalls::run_cut(
    const Part& part,
    Names& inside) {
  std::vector<Cut> cuts;
  for (const auto& [name, outside] : part.inputs) {
    ValueId value = outside;
    if (!tape_.at(outside).param) {
      value = tape_.add(Value(tape_.at(outside)));
      cuts.push_back({outside, value});
    }
    run_.hold(inside, name, value);
  }
  run_.run(graph_, part.call.begin, part.call.end, last_, inside);
  return cuts;
}

/// A copy of that state.
ValueId RecomputedCalls::add_state(const Part& part) {
  return tape_.add(
      {.shape = shape_of({part.state_bytes}, format::DType::UInt8),
       .block = tape_.heap.allocate(part.state_bytes)});
}

void RecomputedCalls::record(
    const std::shared_ptr<Part>& part,
    ValueId state,
    const Names& inside,
    Names& names) {
  GradNode node{.results = {}, .inputs = {}, .saved = {state}};
  for (const auto& [name, value] : inside) {
    Value result = tape_.at(value);
    const bool learns = tape_.needs_gradient(value);
    result.needs_gradient = false; // unless the node is recorded
    const ValueId outside = tape_.add(std::move(result));
    run_.hold(names, name, outside);
    if (learns) {
      node.results.push_back(outside);
      part->outputs.emplace_back(name, outside);
    }
  }
  for (const auto& [name, value] : part->inputs) {
    node.inputs.push_back({value, Flow::Pass});
    if (!tape_.at(value).seen) {
      node.saved.push_back(value);
    }
  }
  node.run = [this, part] { run_backward(*part); };
  tape_.record(std::move(node));
}

void RecomputedCalls::run_backward(const Part& part) {
  const ValueId state = add_state(part);
  Names inside;
  const std::vector<Cut> cuts = run_cut(part, inside);
  const std::vector<GradNode> nodes = tape_.begin_part();
  std::vector<Heap::Block> held;
  for (const auto& [name, outside] : part.outputs) {
    const auto gradient = tape_.take_gradient(outside);
    const auto value = inside.find(name);
    if (gradient && value != inside.end()) {
      tape_.heap.retain(*gradient);
      held.push_back(*gradient);
      tape_.add_gradient(value->second, *gradient);
    }
  }
  run_.let_go(inside);
  tape_.heap.release(tape_.at(state).block);
  tape_.run_backward(nodes);
  for (const Heap::Block gradient : held) {
    tape_.heap.release(gradient);
  }
  for (const Cut& cut : cuts) {
    const auto gradient = tape_.take_gradient(cut.inside);
    if (gradient && tape_.at(cut.outside).needs_gradient) {
      tape_.add_gradient(cut.outside, *gradient);
    } else if (gradient) {
      tape_.heap.release(*gradient);
    }
  }
}

} // namespace tessera::plan
