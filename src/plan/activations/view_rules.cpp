// Operators that show memory in another way, or copy it if they must.
#include <algorithm>
#include <array>

#include "plan/activations/operator_rules.h"

namespace tessera::plan {
namespace {

/// The gradient is shown in the same way.
constexpr std::array<std::string_view, 24> kViews{
    "H",         "T",       "adjoint",         "alias",
    "conj",      "expand",  "expand_as",       "broadcast_to",
    "mH",        "mT",      "matrix_H",        "movedim",
    "numpy_T",   "permute", "squeeze",         "swapaxes",
    "swapdims",  "t",       "transpose",       "unflatten",
    "unsqueeze", "view",    "view_as_complex", "view_as_real"};

/// Backward makes a gradient of the whole, with zeros.
constexpr std::array<std::string_view, 8> kParts{
    "as_strided",
    "diagonal",
    "imag",
    "narrow",
    "real",
    "select",
    "slice",
    "unfold"};

/// Lists of parts.
constexpr std::array<std::string_view, 6> kLists{
    "chunk",
    "split",
    "split_with_sizes",
    "tensor_split",
    "unbind",
    "hsplit"};

constexpr std::array<std::string_view, 5> kReshapes{
    "flatten",
    "ravel",
    "reshape",
    "reshape_as",
    "view_as"};

constexpr std::array<std::string_view, 4> kConversions{
    "_to_copy",
    "float",
    "to",
    "type_as"};

template <class Names>
bool is_one_of(std::string_view name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void split(OperatorCall& call, ValueId whole) {
  std::vector<ValueId> parts;
  for (const TensorShape& shape : call.shapes()) {
    parts.push_back(call.detached(whole, shape));
  }
  call.record({.results = parts, .inputs = {{whole, Flow::Make}}, .saved = {}});
  for (const ValueId part : parts) {
    call.give(part);
  }
}

void reshape(OperatorCall& call, ValueId from) {
  const TensorShape& shape = call.shapes().front();
  if (!can_view(call.shape(from), shape.sizes)) {
    from = contiguous_copy(call, from);
  }
  call.give(call.view(from, shape));
}

} // namespace

ValueId cast(OperatorCall& call, ValueId value, format::DType dtype) {
  if (call.shape(value).dtype == dtype) {
    return value;
  }
  const ValueId result =
      call.make(dense_like(in_dtype(call.shape(value), dtype)));
  call.record(
      {.results = {result}, .inputs = {{value, Flow::Make}}, .saved = {}});
  return result;
}

ValueId contiguous_copy(OperatorCall& call, ValueId value) {
  if (call.shape(value).is_contiguous()) {
    return value;
  }
  const ValueId result =
      call.make(shape_of(call.shape(value).sizes, call.shape(value).dtype));
  call.record(
      {.results = {result}, .inputs = {{value, Flow::Pass}}, .saved = {}});
  return result;
}

bool apply_view_rule(std::string_view name, OperatorCall& call) {
  if (call.tensors().empty() || call.shapes().empty()) {
    return false;
  }
  const ValueId first = call.tensors().front();
  const TensorShape& shape = call.shapes().front();
  if (is_one_of(name, kViews)) {
    const bool is_whole = call.shape(first).numel() == shape.numel();
    call.give(call.view(first, shape, is_whole ? Flow::Pass : Flow::Make));
  } else if (is_one_of(name, kParts)) {
    call.give(call.view(first, shape, Flow::Make));
  } else if (is_one_of(name, kLists)) {
    split(call, first);
  } else if (is_one_of(name, kReshapes)) {
    reshape(call, first);
  } else if (name == "contiguous") {
    call.give(call.view(contiguous_copy(call, first), shape));
  } else if (is_one_of(name, kConversions)) {
    call.give(call.view(cast(call, first, shape.dtype), shape));
  } else if (name == "detach" || name == "detach_" || name == "lift_fresh") {
    call.give(call.detached(first, shape));
  } else {
    return false;
  }
  return true;
}

} // namespace tessera::plan
