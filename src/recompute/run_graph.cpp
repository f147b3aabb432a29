#include "recompute/run_graph.h"

#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace tessera::recomputation {
namespace {

namespace autograd = torch::autograd;

/// A tensor that a run uses more often than this has the gradients of its uses
/// added up inside the run: keeping all of them would take too much memory.
constexpr int kMaxSeparateUses = 4;

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
  // NOLINTNEXTLINE(modernize-loop-convert): `nodes` grows.
  for (size_t i = 0; i < nodes.size(); ++i) {
    const autograd::edge_list& edges = nodes[i]->next_edges();
    std::for_each(edges.begin(), edges.end(), follow);
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto* a, const auto* b) {
    return a->sequence_nr() > b->sequence_nr();
  });
  return nodes;
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

} // namespace

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

Detour::Detour(RunGraph& graph) : graph_(graph) {
  for (const autograd::Edge& exit : graph.exits) {
    sinks_.emplace_back(libtorch::make_node<Sink>(exit), 0);
  }
  for (const auto& [edge, exit] : graph.uses) {
    *edge = sinks_[exit];
  }
}

Detour::~Detour() {
  for (const auto& [edge, exit] : graph_.uses) {
    *edge = graph_.exits[exit];
  }
}

} // namespace tessera::recomputation
