#include "engine/gather_node.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "engine/schedule.h"
#include "engine/unit.h"

namespace tessera::engine {

torch::autograd::variable_list GatherNode::apply(
    torch::autograd::variable_list&& gradients) {
  if (at::GradMode::is_enabled()) {
    raise<c10::NotImplementedError>(
        {.call = "backward", .unit = unit_->name()},
        "a backward with create_graph=true through sharded parameters is not supported. Gradients of inputs, torch::autograd::grad(output, {input}, ..., create_graph=true), are.");
  }
  at::NoGradGuard no_grad;
  // Only grad(loss, leaves) and backward(inputs = leaves) want results here.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool to_engine = wanted != nullptr && !wanted->empty();
  return unit_->schedule().take_gradients(
      *unit_,
      std::move(gradients),
      to_engine ? Schedule::Destination::Engine
                : Schedule::Destination::Leaves);
}

} // namespace tessera::engine
