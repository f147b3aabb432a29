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

namespace tessera::recomputation {

using TensorFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// [Note: recompute]
///
/// Python drops activations with hooks on saved tensors. LibTorch takes such
/// hooks from Python objects only, so here the graph itself is cut. The first
/// run builds its graph as usual; the places where that graph leaves the run,
/// its *exits*, are recorded: gradient accumulators of leaves, the nodes behind
/// faces, and any other nodes that existed before. Then the graph is dropped,
/// and with it the activations. One RecomputeNode takes its place, with the
/// exits as its own next edges. So the peak of a forward includes the
/// activations of one run, which backward needs at once anyway.
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
/// gradients once per block instead of once per backward. With exits,
/// parameters, captured activations and inputs are all treated alike. Sinks are
/// used rather than captures of the engine, which would run the hooks of
/// parameters a second time.
///
/// Two runs must have the same exits: otherwise gradients would reach the wrong
/// tensors, so this is an error.

/// Calls `first` and returns its outputs, without the graph behind them;
/// backward calls `again` and continues from there. Both must compute the same.
/// Needs grad mode.
std::vector<at::Tensor> run_without_graph(
    const TensorFunction& first,
    TensorFunction again,
    const std::vector<at::Tensor>& inputs);

/// See [Note: recompute].
class RecomputeNode : public torch::autograd::Node {
 public:
  /// The properties of a tensor that two runs must agree on.
  struct Output {
    explicit Output(const at::Tensor& tensor);
    std::string describe() const;
    bool operator==(const Output&) const = default;

    std::optional<at::ScalarType> dtype; // none: undefined
    std::vector<int64_t> sizes;
    bool requires_grad;
  };

  /// What is needed to run again, and to check that both runs were the same.
  struct Run {
    TensorFunction again;
    std::vector<torch::autograd::SavedVariable> inputs;
    std::vector<Output> outputs;
    torch::autograd::edge_list exits;
    std::vector<int64_t> leaf_versions; // by exit; -1 if it is not a leaf
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

} // namespace tessera::recomputation
