// The graph that one run of a recomputed function makes: see [Note: recompute].
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

#include "libtorch/autograd_compat.h"

namespace tessera::recomputation {

inline bool has_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

/// Distinguishes the nodes that a run makes from those that existed before.
/// Sequence numbers count per thread, and the engine may rerun on a thread of
/// its own.
class RunMark {
 public:
  bool has_made(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= begin_ &&
        node.sequence_nr() != UINT64_MAX; // accumulators, gather nodes
  }

 private:
  const uint64_t thread_ = at::RecordFunction::currentThreadId();
  const uint64_t begin_ = at::sequence_number::peek();
};

/// The graph that a run made.
struct RunGraph {
  struct Use {
    torch::autograd::Edge*
        edge; // of one of the run's nodes, or one of the roots
    size_t exit;
  };

  torch::autograd::edge_list roots; // behind the outputs that require gradients
  /// In the order in which backward reaches them, once for each use: added up
  /// outside, as without the run, they give the same bits.
  torch::autograd::edge_list exits;
  std::vector<Use> uses;
  std::vector<libtorch::NodePtr>
      kept; // nodes with uses that the roots do not keep
};

/// The graph behind the outputs of a run.
RunGraph trace(const std::vector<at::Tensor>& outputs, const RunMark& mark);

/// Lets a graph end in sinks instead of its exits, as long as it exists.
class Detour {
 public:
  explicit Detour(RunGraph& graph);
  ~Detour();
  Detour(const Detour&) = delete;
  Detour& operator=(const Detour&) = delete;

  /// By exit.
  const torch::autograd::edge_list& sinks() const {
    return sinks_;
  }

 private:
  RunGraph& graph_;
  torch::autograd::edge_list sinks_;
};

} // namespace tessera::recomputation
