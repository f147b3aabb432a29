// The autograd node that stands for a computation done twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::engine {

using TensorFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// [Note: recompute]
///
/// Python drops activations with hooks on saved tensors. LibTorch takes such
/// hooks from Python objects only, so here the graph itself is cut. The first
/// run builds its graph as usual; where that graph leaves the run, its *exits*,
/// is noted: gradient accumulators of leaves, the nodes behind faces, whatever
/// else there was before. Then the graph is dropped, and with it the
/// activations. One RecomputeNode takes its place, with the exits as its own
/// next edges. So a forward peaks with the activations of one run, which
/// backward needs at once anyway.
///
/// Backward runs the function again, lets the exits of the new graph end in
/// sinks, has a nested backward bring the gradients there, and returns them.
/// To the outer engine it looks as if the node had computed them itself.
///
/// The usual way, a Function with a nested backward that accumulates straight
/// into the leaves, sees inputs only. It needs a dummy input for the rest to
/// get gradients at all, writes to .grad when the caller asked for
/// torch::autograd::grad(), runs through the graphs of captured activations,
/// which then are gone for their other users, and would reduce a unit's
/// gradients once a block instead of once a backward. With exits, parameters,
/// captured activations and inputs are all the same. Sinks rather than
/// captures of the engine: those would run the hooks of parameters a second
/// time.
///
/// Two runs must have the same exits: if not, gradients would go astray, and
/// that is an error.

/// Calls `first` and returns its outputs, without the graph behind them;
/// backward calls `again` and goes on from there. Both must compute the same.
/// Needs grad mode.
std::vector<at::Tensor> run_without_graph(
    const TensorFunction& first,
    TensorFunction again,
    const std::vector<at::Tensor>& inputs);

/// See [Note: recompute].
class RecomputeNode : public torch::autograd::Node {
 public:
  /// What a tensor is, as far as two runs must agree on it.
  struct Output {
    explicit Output(const at::Tensor& tensor);
    std::string describe() const;
    bool operator==(const Output&) const = default;

    std::optional<at::ScalarType> dtype; // none: undefined
    std::vector<int64_t> sizes;
    bool requires_grad;
  };

  /// What is needed to run again, and to see that it was the same.
  struct Run {
    TensorFunction again;
    std::vector<torch::autograd::SavedVariable> inputs;
    std::vector<Output> outputs;
    torch::autograd::edge_list exits;
    std::vector<int64_t> leaf_versions; // by exit; -1 where it is no leaf
  };

  explicit RecomputeNode(Run run);

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override {
    return "TesseraRecompute";
  }

 private:
  std::shared_ptr<const Run> run_; // until release_variables()
};

} // namespace tessera::engine
