#include "plan/activations/tape.h"

#include <algorithm>
#include <utility>

namespace tessera::plan {

ValueId Tape::add(Value value) {
  values_.push_back(std::move(value));
  gradients_.emplace_back();
  return values_.size() - 1;
}

void Tape::record(GradNode node) {
  std::erase_if(node.inputs, [&](const GradNode::Input& input) {
    return !needs_gradient(input.value);
  });
  std::erase_if(node.results, [&](ValueId result) {
    return !values_[result].shape.is_differentiable();
  });
  if (node.inputs.empty() || node.results.empty()) {
    return;
  }
  for (const ValueId saved : node.saved) {
    heap.retain(values_[saved].block);
  }
  for (const ValueId result : node.results) {
    values_[result].needs_gradient = true;
  }
  nodes_.push_back(std::move(node));
}

std::vector<GradNode> Tape::begin_part() {
  return std::exchange(nodes_, {});
}

std::vector<GradNode> Tape::end_part(std::vector<GradNode> before) {
  return std::exchange(nodes_, std::move(before));
}

void Tape::drop(const std::vector<GradNode>& nodes) {
  for (const GradNode& node : nodes) {
    drop(node);
  }
}

void Tape::drop(const GradNode& node) {
  for (const ValueId saved : node.saved) {
    heap.release(values_[saved].block);
  }
}

void Tape::keep_only_for(std::optional<ValueId> value) {
  std::vector<bool> leads(values_.size());
  if (value) {
    leads[*value] = true;
  }
  std::vector<GradNode> kept;
  for (size_t i = nodes_.size(); i-- > 0;) {
    GradNode& node = nodes_[i];
    const bool is_kept = std::any_of(
        node.results.begin(), node.results.end(), [&](ValueId result) {
          return leads[result];
        });
    if (!is_kept) {
      drop(node);
      continue;
    }
    for (const auto& input : node.inputs) {
      leads[input.value] = true;
    }
    kept.push_back(std::move(node));
  }
  std::reverse(kept.begin(), kept.end());
  nodes_ = std::move(kept);
}

void Tape::touch(const ParamPlace& param) {
  events_->push_back({.kind = StepEvent::Kind::Touch, .unit = param.unit});
}

void Tape::compute(double flops) {
  if (flops > 0) {
    events_->push_back({.kind = StepEvent::Kind::Compute, .flops = flops});
  }
}

void Tape::note_param_gradient(const ParamPlace& param) {
  events_->push_back(
      {.kind = StepEvent::Kind::Gradient,
       .unit = param.unit,
       .param = param.param});
}

void Tape::add_gradient(ValueId value, Heap::Block gradient) {
  auto& mine = gradients_[value];
  if (!mine) {
    mine = gradient;
    return;
  }
  // Autograd adds in place where nobody else sees the memory.
  if (heap.is_shared(*mine)) {
    std::swap(*mine, gradient);
  }
  if (heap.is_shared(*mine)) {
    const Heap::Block sum = heap.allocate(values_[value].shape.bytes());
    heap.release(std::exchange(*mine, sum));
  }
  heap.release(gradient);
}

std::optional<Heap::Block> Tape::take_gradient(ValueId value) {
  return std::exchange(gradients_[value], std::nullopt);
}

void Tape::run_backward(const std::vector<GradNode>& nodes) {
  for (size_t i = nodes.size(); i-- > 0;) {
    run(nodes[i]);
  }
}

void Tape::run(const GradNode& node) {
  const bool is_reached = std::any_of(
      node.results.begin(), node.results.end(), [&](ValueId result) {
        return gradients_[result].has_value();
      });
  if (!is_reached) {
    drop(node);
    return;
  }
  for (const ValueId saved : node.saved) {
    if (values_[saved].seen) {
      touch(*values_[saved].seen);
    }
  }
  if (node.run) {
    node.run();
    drop(node);
    return;
  }
  std::vector<Heap::Block> incoming;
  for (const ValueId result : node.results) {
    if (const auto gradient = take_gradient(result)) {
      incoming.push_back(*gradient);
    }
  }
  compute(node.flops);
  heap.touch(node.temporary);
  make_gradients(node, incoming);
}

/// They are handed on when the node has let go of what it was given and of what
/// it saved.
void Tape::make_gradients(
    const GradNode& node,
    const std::vector<Heap::Block>& incoming) {
  std::vector<std::pair<ValueId, Heap::Block>> made;
  for (const auto& [input, flow] : node.inputs) {
    const Value& value = values_[input];
    std::optional<Heap::Block> product;
    if (flow == Flow::MakeFromProduct) {
      product = heap.allocate(values_[node.results.front()].shape.bytes());
    }
    if (value.param && flow != Flow::Pass) {
      note_param_gradient(*value.param);
    } else if (!value.param && flow != Flow::Pass) {
      made.emplace_back(input, heap.allocate(value.shape.bytes()));
    }
    if (product) {
      heap.release(*product);
    }
  }
  for (const auto& [input, flow] : node.inputs) {
    if (flow == Flow::Pass && !values_[input].param) {
      heap.retain(incoming.front());
      made.emplace_back(input, incoming.front());
    }
  }
  for (const Heap::Block block : incoming) {
    heap.release(block);
  }
  drop(node);
  for (const auto& [input, flow] : node.inputs) {
    if (flow == Flow::Pass && values_[input].param) {
      note_param_gradient(*values_[input].param);
    }
  }
  for (const auto& [input, gradient] : made) {
    add_gradient(input, gradient);
  }
}

} // namespace tessera::plan
