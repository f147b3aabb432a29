// Products of matrices.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "plan/activations/operator_rules.h"

namespace tessera::plan {
namespace {

double product_flops(const TensorShape& result, int64_t terms) {
  return 2 * static_cast<double>(result.numel()) * static_cast<double>(terms);
}

/// A factor as matrices: its leading dimensions as one, without a copy if that
/// can be.
ValueId as_matrices(OperatorCall& call, ValueId factor, size_t matrix_dims) {
  const TensorShape& shape = call.shape(factor);
  const size_t rank = shape.sizes.size();
  const bool can_be_seen =
      rank <= matrix_dims || can_merge(shape, 0, rank - matrix_dims);
  return can_be_seen ? factor : contiguous_copy(call, factor);
}

/// A factor of a batched product, repeated along the batch.
ValueId expanded(
    OperatorCall& call,
    ValueId factor,
    const std::vector<int64_t>& batch) {
  TensorShape shape = call.shape(factor);
  const size_t rank = batch.size() + 2;
  while (shape.sizes.size() < rank) {
    shape.sizes.insert(shape.sizes.begin(), 1);
    shape.strides.insert(shape.strides.begin(), 0);
  }
  const int64_t before = shape.numel();
  for (size_t i = 0; i < batch.size(); ++i) {
    if (shape.sizes[i] != batch[i]) {
      shape.sizes[i] = batch[i];
      shape.strides[i] = 0;
    }
  }
  return shape.numel() == before ? factor
                                 : call.view(factor, shape, Flow::Make);
}

void linear(OperatorCall& call) {
  const auto input = call.tensor("input");
  const auto weight = call.tensor("weight");
  if (!input || !weight || call.shape(*weight).sizes.empty()) {
    return;
  }
  const TensorShape& shape = call.shapes().front();
  const ValueId rows = as_matrices(call, cast(call, *input, shape.dtype), 1);
  const ValueId matrix = cast(call, *weight, shape.dtype);
  const double flops = product_flops(shape, call.shape(*weight).sizes.back());
  call.compute(flops);
  const ValueId result = call.make(shape);
  GradNode node{.results = {result}, .inputs = {}, .saved = {}};
  node.flops = 2 * flops;
  node.inputs = {{rows, Flow::Make}, {matrix, Flow::Make}};
  if (call.needs_gradient(matrix)) {
    node.saved.push_back(rows);
  }
  if (call.needs_gradient(rows)) {
    node.saved.push_back(matrix);
  }
  if (const auto bias = call.tensor("bias")) {
    node.inputs.push_back({*bias, Flow::Make});
  }
  call.record(std::move(node));
  call.give(result);
}

/// "bhtd,bhsd->bhts".
struct Equation {
  std::string left;
  std::string right;
  std::string result;
};

std::optional<Equation> read_equation(std::string text) {
  std::erase(text, ' ');
  const size_t comma = text.find(',');
  const size_t arrow = text.find("->");
  if (comma == text.npos || arrow == text.npos || comma > arrow ||
      text.find('.') != text.npos || text.find(',', comma + 1) != text.npos) {
    return std::nullopt;
  }
  return Equation{
      .left = text.substr(0, comma),
      .right = text.substr(comma + 1, arrow - comma - 1),
      .result = text.substr(arrow + 2)};
}

bool contains(const std::string& letters, char letter) {
  return letters.find(letter) != letters.npos;
}

/// A factor of einsum() as a batch of matrices: the dimensions that both
/// factors and the result have are one, those that only one factor has, and
/// those that are summed over. A copy, if dimensions of one kind cannot be
/// merged.
ValueId as_batch(
    OperatorCall& call,
    ValueId factor,
    const std::string& letters,
    const std::string& other,
    const std::string& result) {
  const TensorShape& shape = call.shape(factor);
  if (letters.size() != shape.sizes.size()) {
    return factor;
  }
  std::string order = result; // in which dimensions are put first
  for (const char letter : letters + other) {
    order += contains(order, letter) ? "" : std::string(1, letter);
  }
  const auto can_be_one = [&](bool in_other, bool in_result) {
    TensorShape kind = shape_of({}, shape.dtype);
    for (const char letter : order) {
      const size_t dim = letters.find(letter);
      if (dim != letters.npos && contains(other, letter) == in_other &&
          contains(result, letter) == in_result) {
        kind.sizes.push_back(shape.sizes[dim]);
        kind.strides.push_back(shape.strides[dim]);
      }
    }
    return can_merge(kind, 0, kind.sizes.size());
  };
  if (can_be_one(true, true) && can_be_one(false, true) &&
      can_be_one(true, false)) {
    return factor;
  }
  const ValueId copy = call.make(shape_of(shape.sizes, shape.dtype));
  call.record(
      {.results = {copy}, .inputs = {{factor, Flow::Pass}}, .saved = {}});
  return copy;
}

void einsum(OperatorCall& call) {
  ValueId left = call.tensors()[0];
  ValueId right = call.tensors()[1];
  const auto equation = read_equation(call.text("equation").value_or(""));
  if (equation) {
    const auto& [of_left, of_right, of_result] = *equation;
    left = as_batch(call, left, of_left, of_right, of_result);
    right = as_batch(call, right, of_right, of_left, of_result);
  }
  const ValueId result = call.make(call.shapes().front());
  GradNode node{.results = {result}, .inputs = {}, .saved = {}};
  node.inputs = {{left, Flow::Make}, {right, Flow::Make}};
  if (call.needs_gradient(right)) {
    node.saved.push_back(left);
  }
  if (call.needs_gradient(left)) {
    node.saved.push_back(right);
  }
  call.record(std::move(node));
  call.give(result);
}

} // namespace

ValueId product(
    OperatorCall& call,
    ValueId left,
    ValueId right,
    const TensorShape& shape,
    std::optional<ValueId> added) {
  left = cast(call, left, shape.dtype);
  right = cast(call, right, shape.dtype);
  const size_t left_rank = call.shape(left).sizes.size();
  const size_t right_rank = call.shape(right).sizes.size();
  if (left_rank > 2 && right_rank > 2 && shape.sizes.size() > 2) {
    const std::vector<int64_t> batch(
        shape.sizes.begin(), shape.sizes.end() - 2);
    left = as_matrices(call, expanded(call, left, batch), 2);
    right = as_matrices(call, expanded(call, right, batch), 2);
  } else if (left_rank > 2) {
    left = as_matrices(call, left, 1);
  }
  const auto& sizes = call.shape(left).sizes;
  const double flops = product_flops(shape, sizes.empty() ? 1 : sizes.back());
  call.compute(flops);
  const ValueId result = call.make(shape);
  GradNode node{.results = {result}, .inputs = {}, .saved = {}};
  node.inputs = {{left, Flow::Make}, {right, Flow::Make}};
  if (added) {
    const bool is_whole = call.shape(*added).numel() == shape.numel();
    node.inputs.push_back({*added, is_whole ? Flow::Pass : Flow::Make});
  }
  node.flops = 2 * flops;
  if (call.needs_gradient(right)) {
    node.saved.push_back(left);
  }
  if (call.needs_gradient(left)) {
    node.saved.push_back(right);
  }
  call.record(std::move(node));
  return result;
}

bool apply_product_rule(std::string_view name, OperatorCall& call) {
  const std::vector<ValueId>& tensors = call.tensors();
  if (call.shapes().empty()) {
    return false;
  }
  constexpr std::array<std::string_view, 6> kProducts{
      "bmm", "dot", "matmul", "mm", "mv", "vdot"};
  const bool is_product =
      std::find(kProducts.begin(), kProducts.end(), name) != kProducts.end();
  if (name == "linear") {
    linear(call);
  } else if (is_product && tensors.size() == 2) {
    call.give(product(call, tensors[0], tensors[1], call.shapes().front()));
  } else if (
      (name == "addmm" || name == "baddbmm" || name == "addmv") &&
      tensors.size() == 3) {
    call.give(product(
        call, tensors[1], tensors[2], call.shapes().front(), tensors[0]));
  } else if (name == "einsum" && tensors.size() == 2) {
    einsum(call);
  }
  return !call.given().empty();
}

bool apply_rule(std::string_view name, OperatorCall& call) {
  return apply_product_rule(name, call) || apply_layer_rule(name, call) ||
      apply_attention_rule(name, call) || apply_view_rule(name, call) ||
      apply_element_rule(name, call);
}

} // namespace tessera::plan
