// A node of a graph, as the rules of operators see it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "exported/format/program.h"
#include "plan/activations/tape.h"
#include "plan/setup.h"

namespace tessera::plan {

/// The tensors of a graph, by name.
using Names = std::map<std::string, ValueId>;

/// Results and what is made on the way belong to the call, until it ends.
class OperatorCall {
 public:
  /// `results` are the shapes of the tensors that the node gives, lists taken
  /// apart.
  OperatorCall(
      const exported::Node& node,
      const Names& names,
      std::vector<TensorShape> results,
      Device device,
      Tape& tape);
  ~OperatorCall();
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;

  /// "mul" of "torch.ops.aten.mul.Tensor", "relu_" with its line.
  static std::string_view name_of(const exported::Node& node);

  /// An argument by the name in the operator's schema; nothing if it was left
  /// out, or is of another kind.
  std::optional<ValueId> tensor(std::string_view name) const;
  std::optional<bool> flag(std::string_view name) const;
  std::optional<double> number(std::string_view name) const;
  std::optional<std::string> text(std::string_view name) const;
  /// All tensors among the arguments, in their order, lists taken apart.
  const std::vector<ValueId>& tensors() const {
    return tensors_;
  }

  const std::vector<TensorShape>& shapes() const { // of the results
    return shapes_;
  }
  const TensorShape& shape(ValueId value) const {
    return tape_.at(value).shape;
  }
  Device device() const {
    return device_;
  }

  /// A tensor in new memory.
  ValueId make(const TensorShape& shape);
  /// A tensor in the memory of another, whose gradient passes through.
  ValueId view(ValueId of, const TensorShape& shape, Flow flow = Flow::Pass);
  /// Another name for an operand that is not differentiable from here on.
  ValueId detached(ValueId of, const TensorShape& shape);
  /// Lets go of what the call made before it ends; nothing for others.
  void drop(ValueId value);
  void record(GradNode node) {
    tape_.record(std::move(node));
  }
  /// Operations of forward; backward has twice as many.
  void compute(double flops) {
    tape_.compute(flops);
  }
  bool needs_gradient(ValueId value) const {
    return tape_.needs_gradient(value);
  }

  /// The next result.
  void give(ValueId value) {
    given_.push_back(value);
  }
  const std::vector<ValueId>& given() const {
    return given_;
  }

 private:
  const exported::Argument* argument(std::string_view name) const;

  const exported::Node& node_;
  const Names& names_;
  const std::vector<TensorShape> shapes_;
  const Device device_;
  Tape& tape_;
  std::vector<ValueId> tensors_;
  std::vector<ValueId> owned_;
  std::vector<ValueId> given_;
};

} // namespace tessera::plan
