#include "recompute/recompute_node.h"

#include <tessera/error.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
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

namespace tessera::engine {
namespace {

namespace autograd = torch::autograd;

bool has_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

/// Distinguishes the nodes that a run makes from those that existed before.
/// Sequence numbers count per thread, and the engine may rerun on a thread of
/// its own.
class RunMark {
 public:
  bool has_made(const autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= begin_ &&
        node.sequence_nr() != UINT64_MAX; // accumulators, gather nodes
  }

 private:
  const uint64_t thread_ = at::RecordFunction::currentThreadId();
  const uint64_t begin_ = at::sequence_number::peek();
};

/// A tensor that a run uses more often than this has the gradients of its uses
/// added up inside the run: keeping all of them would take too much memory.
constexpr int kMaxSeparateUses = 4;

/// The graph that a run made.
struct RunGraph {
  struct Use {
    autograd::Edge* edge; // of one of the run's nodes, or one of the roots
    size_t exit;
  };

  autograd::edge_list roots; // behind the outputs that require gradients
  /// In the order in which backward reaches them, once for each use: added up
  /// outside, as without the run, they give the same bits.
  autograd::edge_list exits;
  std::vector<Use> uses;
  std::vector<NodePtr> kept; // nodes with uses that the roots do not keep
};

/// The nodes that a run made, those first that backward comes to first.
std::vector<autograd::Node*> nodes_of(
    const autograd::edge_list& roots,
    const RunMark& mark) {
  std::vector<autograd::Node*> nodes;
  std::unordered_set<const autograd::Node*> seen;
  const auto follow = [&](const autograd::Edge& edge) {
    if (edge.is_valid() && mark.has_made(*edge.function) &&
        seen.insert(edge.function.get()).second) {
      nodes.push_back(edge.function.get());
    }
  };
  std::for_each(roots.begin(), roots.end(), follow);
  for (size_t i = 0; i < nodes.size(); ++i) { // grows
    const autograd::edge_list& edges = nodes[i]->next_edges();
    std::for_each(edges.begin(), edges.end(), follow);
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto* a, const auto* b) {
    return a->sequence_nr() > b->sequence_nr();
  });
  return nodes;
}

RunGraph trace(const std::vector<at::Tensor>& outputs, const RunMark& mark) {
  RunGraph graph;
  for (const at::Tensor& output : outputs) {
    if (has_gradient(output)) {
      graph.roots.push_back(autograd::impl::gradient_edge(output));
    }
  }
  const auto nodes = nodes_of(graph.roots, mark);
  std::vector<autograd::edge_list*> edges{&graph.roots};
  for (autograd::Node* node : nodes) {
    edges.push_back(&node->next_edges());
  }
  const auto is_exit = [&](const autograd::Edge& edge) {
    return edge.is_valid() && !mark.has_made(*edge.function);
  };
  std::unordered_map<autograd::Edge, int> num_uses;
  for (const autograd::edge_list* list : edges) {
    for (const autograd::Edge& edge : *list) {
      num_uses[edge] += is_exit(edge) ? 1 : 0;
    }
  }
  std::unordered_map<autograd::Edge, size_t> shared;
  const auto exit_of = [&](const autograd::Edge& edge) {
    if (num_uses[edge] <= kMaxSeparateUses) {
      graph.exits.push_back(edge);
      return graph.exits.size() - 1;
    }
    const auto [entry, is_new] = shared.try_emplace(edge, graph.exits.size());
    if (is_new) {
      graph.exits.push_back(edge);
    }
    return entry->second;
  };
  for (size_t i = 0; i < edges.size(); ++i) {
    // A write to a view runs another node, which has the same edges but for the
    // first.
    auto* write =
        i == 0 ? nullptr : dynamic_cast<autograd::CopySlices*>(nodes[i - 1]);
    for (size_t j = 0; j < edges[i]->size(); ++j) {
      autograd::Edge& edge = (*edges[i])[j];
      if (!is_exit(edge)) {
        continue;
      }
      const size_t exit = exit_of(edge);
      graph.uses.push_back({&edge, exit});
      if (write != nullptr && j > 0) {
        graph.uses.push_back({&write->fn->next_edges()[j], exit});
        graph.kept.push_back(write->fn);
      }
    }
  }
  return graph;
}

/// Where a gradient waits to be picked up by the engine; never runs.
struct Sink : autograd::Node {
  explicit Sink(const autograd::Edge& exit) {
    input_metadata_.push_back(exit.function->input_metadata(exit.input_nr));
  }
  autograd::variable_list apply(autograd::variable_list&&) override {
    return {};
  }
};

/// Lets a graph end in sinks instead of its exits, as long as it exists.
class Detour {
 public:
  explicit Detour(RunGraph& graph) : graph_(graph) {
    for (const autograd::Edge& exit : graph.exits) {
      sinks_.emplace_back(make_node<Sink>(exit), 0);
    }
    for (const auto& [edge, exit] : graph.uses) {
      *edge = sinks_[exit];
    }
  }
  ~Detour() {
    for (const auto& [edge, exit] : graph_.uses) {
      *edge = graph_.exits[exit];
    }
  }
  Detour(const Detour&) = delete;
  Detour& operator=(const Detour&) = delete;

  /// By exit.
  const autograd::edge_list& sinks() const {
    return sinks_;
  }

 private:
  RunGraph& graph_;
  autograd::edge_list sinks_;
};

/// The leaf whose gradients an edge accumulates, if it does.
const at::Tensor* leaf_of(const autograd::Edge& edge) {
  const auto* node =
      dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get());
  return node == nullptr ? nullptr : &node->variable;
}

/// The unit whose parameters an edge leads to, if it does.
const Unit* unit_of(const autograd::Edge& edge) {
  const auto* node = dynamic_cast<const GatherNode*>(edge.function.get());
  return node == nullptr ? nullptr : &node->unit();
}

int64_t leaf_version(const autograd::Edge& exit) {
  if (const Unit* unit = unit_of(exit)) {
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
      if (const Unit* unit = unit_of(run.exits[i])) {
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
  const auto node = make_node<RecomputeNode>(std::move(run));
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

} // namespace tessera::engine
