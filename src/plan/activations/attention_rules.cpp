// scaled_dot_product_attention, by the kernel that LibTorch takes for it.
#include <algorithm>
#include <optional>
#include <utility>

#include "plan/activations/operator_rules.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

struct Attention {
  ValueId query;
  ValueId key;
  ValueId value;
  std::optional<ValueId> mask;
  double dropout = 0;
  bool shares_heads = false; // several queries have one key and one value
};

/// (batch, heads, queries, keys)
TensorShape scores_of(const OperatorCall& call, const Attention& attention) {
  TensorShape shape = shape_of(
      call.shape(attention.query).sizes, call.shape(attention.query).dtype);
  shape.sizes.back() = call.shape(attention.key)
                           .sizes[call.shape(attention.key).sizes.size() - 2];
  return shape_of(shape.sizes, shape.dtype);
}

double attention_flops(const OperatorCall& call, const Attention& attention) {
  return 4 * static_cast<double>(scores_of(call, attention).numel()) *
      static_cast<double>(call.shape(attention.query).sizes.back());
}

/// One kernel that keeps no scores. A mask of flags becomes one of numbers.
bool is_fused(const OperatorCall& call, const Attention& attention) {
  const auto& query = call.shape(attention.query).sizes;
  const auto& key = call.shape(attention.key).sizes;
  const auto& value = call.shape(attention.value).sizes;
  const bool has_rank_4 =
      query.size() == 4 && key.size() == 4 && value.size() == 4;
  const auto is_alike = [&](size_t dim) {
    return query[dim] == key[dim] && query[dim] == value[dim];
  };
  return has_rank_4 && is_alike(0) && (is_alike(1) || attention.shares_heads) &&
      is_alike(3) &&
      !(attention.mask && call.needs_gradient(*attention.mask)) &&
      (call.device() == Device::Cuda || attention.dropout == 0);
}

/// Keys or values with as many heads as queries have.
ValueId repeated(OperatorCall& call, ValueId value, ValueId query) {
  TensorShape shape = call.shape(value);
  const auto& wanted = call.shape(query).sizes;
  const size_t rank = shape.sizes.size();
  if (rank < 3 || rank != wanted.size() ||
      shape.sizes[rank - 3] == wanted[rank - 3]) {
    return value;
  }
  shape.sizes[rank - 3] = wanted[rank - 3];
  const ValueId result = call.make(shape_of(shape.sizes, shape.dtype));
  call.record(
      {.results = {result}, .inputs = {{value, Flow::Make}}, .saved = {}});
  return result;
}

std::optional<ValueId> number_mask(
    OperatorCall& call,
    const Attention& attention) {
  if (!attention.mask) {
    return std::nullopt;
  }
  const TensorShape& shape = call.shape(*attention.mask);
  if (shape.dtype != format::DType::Bool) {
    return attention.mask;
  }
  return call.make(shape_of(shape.sizes, call.shape(attention.query).dtype));
}

void fused(OperatorCall& call, const Attention& attention) {
  const TensorShape& shape = call.shapes().front();
  const auto mask = number_mask(call, attention);
  const double flops = attention_flops(call, attention);
  call.compute(flops);
  const ValueId result = call.make(shape);
  auto rows = call.shape(attention.query).sizes;
  rows.pop_back();
  const auto wide = [](format::DType dtype) {
    return dtype == format::DType::Float64 ? dtype : format::DType::Float32;
  };
  const ValueId log_sum_exp = call.make(shape_of(rows, wide(shape.dtype)));
  GradNode node{.results = {result}, .inputs = {}, .saved = {}};
  node.inputs = {
      {attention.query, Flow::Make},
      {attention.key, Flow::Make},
      {attention.value, Flow::Make}};
  node.saved = {
      attention.query, attention.key, attention.value, result, log_sum_exp};
  if (mask) {
    node.saved.push_back(*mask);
  }
  node.flops = 2 * flops;
  call.record(std::move(node));
  call.give(result);
}

/// A new tensor of the same shape; what it came from may go.
ValueId scaled(OperatorCall& call, ValueId value) {
  const ValueId result = call.make(dense_like(call.shape(value)));
  call.record(
      {.results = {result}, .inputs = {{value, Flow::Make}}, .saved = {}});
  return result;
}

ValueId transposed(OperatorCall& call, ValueId value) {
  TensorShape shape = call.shape(value);
  const size_t rank = shape.sizes.size();
  std::swap(shape.sizes[rank - 1], shape.sizes[rank - 2]);
  std::swap(shape.strides[rank - 1], shape.strides[rank - 2]);
  return call.view(value, shape);
}

/// A function of elements that saves its result, or what it draws.
ValueId of_scores(OperatorCall& call, ValueId scores, bool draws) {
  const ValueId noise =
      draws ? call.make(call.shape(scores)) : scores; // or none
  const ValueId result = call.make(call.shape(scores));
  call.record(
      {.results = {result},
       .inputs = {{scores, Flow::Make}},
       .saved = {draws ? noise : result}});
  return result;
}

/// Operator by operator, in float32 if the inputs are narrower.
void unfused(OperatorCall& call, const Attention& attention) {
  const TensorShape& shape = call.shapes().front();
  const bool is_narrow = shape.dtype == format::DType::Float16 ||
      shape.dtype == format::DType::BFloat16;
  const format::DType dtype = is_narrow ? format::DType::Float32 : shape.dtype;
  const ValueId query = scaled(call, cast(call, attention.query, dtype));
  const auto with_heads = [&](ValueId factor) {
    return attention.shares_heads ? repeated(call, factor, attention.query)
                                  : factor;
  };
  const ValueId key = scaled(
      call, transposed(call, with_heads(cast(call, attention.key, dtype))));
  const TensorShape scores = in_dtype(scores_of(call, attention), dtype);
  const ValueId raw = product(call, query, key, scores, attention.mask);
  call.drop(query);
  call.drop(key);
  ValueId weights = of_scores(call, raw, false);
  call.drop(raw);
  if (attention.dropout > 0) {
    const ValueId kept = of_scores(call, weights, true);
    call.drop(weights);
    weights = kept;
  }
  const ValueId value = with_heads(cast(call, attention.value, dtype));
  const ValueId result = product(call, weights, value, in_dtype(shape, dtype));
  call.give(cast(call, result, shape.dtype));
}

} // namespace

bool apply_attention_rule(std::string_view name, OperatorCall& call) {
  const auto query = call.tensor("query");
  const auto key = call.tensor("key");
  const auto value = call.tensor("value");
  if (name != "scaled_dot_product_attention" || !query || !key || !value ||
      call.shapes().empty()) {
    return false;
  }
  for (const ValueId each : {*query, *key, *value}) {
    if (call.shape(each).sizes.size() < 2) {
      return false;
    }
  }
  const Attention attention{
      .query = *query,
      .key = *key,
      .value = *value,
      .mask = call.tensor("attn_mask"),
      .dropout = call.number("dropout_p").value_or(0),
      .shares_heads = call.flag("enable_gqa").value_or(false)};
  if (is_fused(call, attention)) {
    fused(call, attention);
  } else {
    unfused(call, attention);
  }
  return true;
}

} // namespace tessera::plan
