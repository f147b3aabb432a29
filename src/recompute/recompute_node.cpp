#include "recompute/recompute_node.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "engine/gather_node.h"
#include "engine/unit.h"
#include "libtorch/autograd_compat.h"
#include "recompute/run_graph.h"

namespace tessera::recomputation {
namespace {

namespace autograd = torch::autograd;

/// The leaf whose gradients an edge accumulates, if it does.
const at::Tensor* leaf_of(const autograd::Edge& edge) {
  const auto* node =
      dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get());
  return node == nullptr ? nullptr : &node->variable;
}

/// The unit whose parameters an edge leads to, if it does.
const engine::Unit* unit_of(const autograd::Edge& edge) {
  const auto* node =
      dynamic_cast<const engine::GatherNode*>(edge.function.get());
  return node == nullptr ? nullptr : &node->unit();
}

int64_t leaf_version(const autograd::Edge& exit) {
  if (const engine::Unit* unit = unit_of(exit)) {
    return unit->num_writes();
  }
  const at::Tensor* leaf = leaf_of(exit);
  return leaf == nullptr ? -1 : leaf->_version();
}

using FirstRun = RecomputeNode::Run;
using Output = RecomputeNode::Output;

/// What a graph saves is checked by autograd, but this graph is gone.
void check_leaves(const FirstRun& run) {
  for (size_t i = 0; i < run.exits.size(); ++i) {
    const int64_t version = leaf_version(run.exits[i]);
    if (version != run.leaf_versions[i]) {
      if (const engine::Unit* unit = unit_of(run.exits[i])) {
        raise(
            {.call = "recompute", .unit = unit->name()},
            "the shard was changed (by an optimizer step?) between forward and backward. Run forward again.");
      }
      const at::Tensor& leaf = *leaf_of(run.exits[i]);
      raise(
          {.call = "recompute"},
          fmt::format(
              "a parameter {} [{}] that the function uses was changed in place (by an optimizer step?) between forward and backward: it is at version {}, expected {}. Run forward again.",
              c10::toString(leaf.scalar_type()),
              fmt::join(leaf.sizes(), ", "),
              version,
              run.leaf_versions[i]));
    }
  }
}

void check_outputs(
    const FirstRun& run,
    const std::vector<at::Tensor>& outputs) {
  constexpr auto kAdvice =
      "It must do the same both times: it may not depend on what changes in between.";
  if (outputs.size() != run.outputs.size()) {
    raise(
        {.call = "recompute"},
        fmt::format(
            "the function gave {} outputs in forward and {} when backward ran it again. {}",
            run.outputs.size(),
            outputs.size(),
            kAdvice));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Output now(outputs[i]);
    if (now != run.outputs[i]) {
      raise(
          {.call = "recompute"},
          fmt::format(
              "output {} of the function was {} in forward and {} when backward ran it again. {}",
              i,
              run.outputs[i].describe(),
              now.describe(),
              kAdvice));
    }
  }
}

void check_exits(const FirstRun& run, const autograd::edge_list& exits) {
  if (exits != run.exits) {
    raise(
        {.call = "recompute"},
        fmt::format(
            "the function used parameters and other tensors that require gradients {} times in forward and {} times when backward ran it again, not the same or not in the same order. It must do the same both times: it may not branch on what changes in between, nor make leaves that require gradients.",
            run.exits.size(),
            exits.size()));
  }
}

/// The graph of a second run. Its outputs are released; the graph holds what it
/// needs.
RunGraph run_again(const FirstRun& run) {
  check_leaves(run);
  std::vector<at::Tensor> inputs;
  for (const autograd::SavedVariable& input : run.inputs) {
    inputs.push_back(input.unpack()); // throws if it was changed
  }
  at::AutoGradMode with_grad(true);
  const RunMark mark;
  const std::vector<at::Tensor> outputs = run.again(inputs);
  check_outputs(run, outputs);
  RunGraph graph = trace(outputs, mark);
  check_exits(run, graph.exits);
  return graph;
}

} // namespace

RecomputeNode::Output::Output(const at::Tensor& tensor)
    : requires_grad(has_gradient(tensor)) {
  if (tensor.defined()) {
    dtype = tensor.scalar_type();
    sizes = tensor.sizes().vec();
  }
}

std::string RecomputeNode::Output::describe() const {
  if (!dtype) {
    return "undefined";
  }
  return fmt::format(
      "{} [{}]{}",
      c10::toString(*dtype),
      fmt::join(sizes, ", "),
      requires_grad ? "" : " without gradient");
}

RecomputeNode::RecomputeNode(Run run)
    : Node(autograd::edge_list(run.exits)),
      run_(std::make_shared<const Run>(std::move(run))) {}

autograd::variable_list RecomputeNode::apply(
    autograd::variable_list&& gradients) {
  std::shared_ptr<const Run> run;
  {
    const std::lock_guard lock(mutex_);
    run = run_;
  }
  TORCH_CHECK(run, autograd::ERR_BACKWARD_TWICE);
  autograd::variable_list result(num_outputs());
  std::vector<size_t> needed; // of the exits
  for (size_t i = 0; i < result.size(); ++i) {
    if (task_should_compute_output(i)) {
      needed.push_back(i);
    }
  }
  const auto is_defined = [](const at::Tensor& t) { return t.defined(); };
  if (needed.empty() ||
      std::none_of(gradients.begin(), gradients.end(), is_defined)) {
    return result;
  }

  RunGraph graph = run_again(*run);
  const Detour detour(graph);
  autograd::edge_list roots;
  autograd::variable_list root_gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) {
      roots.push_back(graph.roots[i]);
      root_gradients.push_back(std::move(gradients[i]));
    }
  }
  autograd::edge_list sinks;
  for (const size_t exit : needed) {
    sinks.push_back(detour.sinks()[exit]);
  }
  const bool create_graph = at::GradMode::is_enabled();
  auto found = autograd::Engine::get_default_engine().execute(
      roots,
      root_gradients,
      /*keep_graph=*/create_graph,
      create_graph,
      /*accumulate_grad=*/false,
      sinks);
  for (size_t i = 0; i < needed.size(); ++i) {
    result[needed[i]] = std::move(found[i]);
  }
  return result;
}

void RecomputeNode::release_variables() {
  std::shared_ptr<const Run> run; // freed without the lock
  const std::lock_guard lock(mutex_);
  run.swap(run_);
}

std::vector<at::Tensor> run_without_graph(
    const TensorFunction& first,
    TensorFunction again,
    const std::vector<at::Tensor>& inputs) {
  FirstRun run{.again = std::move(again)};
  // Saved before the run, so that a function that writes to them is noticed.
  for (const at::Tensor& input : inputs) {
    run.inputs.emplace_back(input, /*is_output=*/false);
  }
  const RunMark mark;
  const std::vector<at::Tensor> outputs = first(inputs);
  if (std::none_of(outputs.begin(), outputs.end(), has_gradient)) {
    return outputs;
  }
  run.outputs = {outputs.begin(), outputs.end()};
  run.exits = trace(outputs, mark).exits;
  for (const autograd::Edge& exit : run.exits) {
    run.leaf_versions.push_back(leaf_version(exit));
  }
  const auto node = libtorch::make_node<RecomputeNode>(std::move(run));
  std::vector<at::Tensor> result;
  for (const at::Tensor& output : outputs) {
    if (!has_gradient(output)) {
      result.push_back(output);
      continue;
    }
    at::Tensor detached = output.detach();
    const auto input = node->add_input_metadata(detached);
    autograd::impl::set_gradient_edge(detached, {node, input});
    result.push_back(std::move(detached));
  }
  return result;
}

} // namespace tessera::recomputation
