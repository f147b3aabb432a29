// Convolutions, norms, embeddings, dropout and pools.
#include <algorithm>
#include <array>
#include <optional>

#include "plan/activations/operator_rules.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kIndexBytes = 8;

double convolution_flops(const TensorShape& result, int64_t terms) {
  return 2 * static_cast<double>(result.numel()) * static_cast<double>(terms);
}

/// Memory of numbers that a kernel keeps beside its result.
ValueId make_bytes(OperatorCall& call, int64_t bytes) {
  return call.make(shape_of({bytes}, format::DType::UInt8));
}

/// On a CPU oneDNN computes in a layout of its own: input, weight and result
/// are copied to it and back, unless the kernel is one element. Channels are
/// padded there.
constexpr int64_t kChannelBlock = 16;

int64_t padded_bytes(const TensorShape& shape) {
  if (shape.sizes.size() < 2 || shape.sizes[1] < 1) {
    return shape.bytes();
  }
  const int64_t channels = shape.sizes[1];
  const int64_t blocks = (channels - 1) / kChannelBlock + 1;
  return times(shape.bytes() / channels, blocks, kChannelBlock);
}

bool copies_layouts(const OperatorCall& call, const TensorShape& weight) {
  int64_t kernel = 1;
  for (size_t i = 2; i < weight.sizes.size(); ++i) {
    kernel = times(kernel, weight.sizes[i]);
  }
  return call.device() == Device::Cpu && kernel > 1;
}

/// What backward holds beside what it was given, at most: first for the
/// gradient of the input, then for that of the weight beside it.
int64_t layouts_in_backward(
    const TensorShape& input,
    const TensorShape& weight,
    const TensorShape& result,
    bool learns_input) {
  const int64_t for_weight = plus(result.bytes(), weight.bytes());
  if (!learns_input) {
    return for_weight;
  }
  const int64_t for_input =
      plus(plus(padded_bytes(result), weight.bytes()), padded_bytes(input));
  return std::max(for_input, plus(for_weight, times(2, input.bytes())));
}

void convolution(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const auto input = call.tensor("input");
  const auto kernel = call.tensor("weight");
  if (!input || !kernel || call.shape(*kernel).sizes.empty()) {
    return;
  }
  const TensorShape& weight = call.shape(*kernel);
  const double flops = convolution_flops(
      shape, weight.numel() / std::max<int64_t>(weight.sizes[0], 1));
  call.compute(flops);
  GradNode node{
      .results = {},
      .inputs = {{*input, Flow::Make}, {*kernel, Flow::Make}},
      .saved = {*input, *kernel}};
  node.flops = 2 * flops;
  std::optional<ValueId> copy;
  if (copies_layouts(call, weight)) {
    copy = make_bytes(call, padded_bytes(shape));
    call.drop(
        make_bytes(call, plus(call.shape(*input).bytes(), weight.bytes())));
    node.temporary = layouts_in_backward(
        call.shape(*input), weight, shape, call.needs_gradient(*input));
  }
  const ValueId result = call.make(shape);
  if (copy) {
    call.drop(*copy);
  }
  node.results = {result};
  if (const auto bias = call.tensor("bias")) {
    node.inputs.push_back({*bias, Flow::Make});
  }
  call.record(std::move(node));
  call.give(result);
}

/// `statistics`: how many numbers the norm keeps.
void norm(OperatorCall& call, int64_t statistics, bool needs_contiguous) {
  ValueId input = call.tensors().front();
  if (needs_contiguous) {
    input = contiguous_copy(call, input);
  }
  const ValueId result = call.make(call.shapes().front());
  const int64_t element = format::element_bytes(call.shape(input).dtype);
  const ValueId kept = make_bytes(
      call,
      times(
          statistics,
          call.device() == Device::Cpu ? element
                                       : std::max(element, kFloatBytes)));
  GradNode node{
      .results = {result}, .inputs = {{input, Flow::Make}}, .saved = {}};
  node.saved = {input, kept};
  for (const char* name : {"weight", "bias"}) {
    if (const auto tensor = call.tensor(name)) {
      node.inputs.push_back({*tensor, Flow::Make});
      node.saved.push_back(*tensor);
    }
  }
  call.record(std::move(node));
  call.give(result);
}

void layer_norm(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const auto weight = call.tensor("weight");
  const int64_t inner = weight ? call.shape(*weight).numel()
      : shape.sizes.empty()    ? 1
                               : shape.sizes.back();
  norm(call, times(2, shape.numel() / std::max<int64_t>(inner, 1)), false);
}

void group_norm(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const auto groups =
      static_cast<int64_t>(call.number("num_groups").value_or(1));
  const int64_t batch = shape.sizes.empty() ? 1 : shape.sizes.front();
  norm(call, times(2, batch, groups), true);
}

void batch_norm(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const int64_t channels = shape.sizes.size() > 1 ? shape.sizes[1] : 1;
  norm(call, call.flag("training").value_or(true) ? 2 * channels : 0, false);
}

/// Made of operators on elements: what is normalized is kept beside the input.
void rms_norm(OperatorCall& call) {
  const ValueId input = call.tensors().front();
  const TensorShape& shape = call.shapes().front();
  const auto weight = call.tensor("weight");
  const int64_t inner = weight ? call.shape(*weight).numel()
      : shape.sizes.empty()    ? 1
                               : shape.sizes.back();
  const ValueId roots = make_bytes(
      call,
      times(
          shape.numel() / std::max<int64_t>(inner, 1),
          format::element_bytes(shape.dtype)));
  const ValueId normalized = call.make(shape);
  GradNode node{
      .results = {normalized}, .inputs = {{input, Flow::Make}}, .saved = {}};
  node.saved = {input, roots};
  node.temporary = times(2, shape.bytes());
  call.record(std::move(node));
  if (!weight) {
    call.give(normalized);
    return;
  }
  const ValueId result = call.make(shape);
  call.record(
      {.results = {result},
       .inputs = {{normalized, Flow::Make}, {*weight, Flow::MakeFromProduct}},
       .saved = {normalized, *weight}});
  call.give(result);
}

/// A batch norm in which each image is a batch.
void instance_norm(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const int64_t count =
      shape.sizes.size() > 1 ? times(shape.sizes[0], shape.sizes[1]) : 1;
  norm(call, times(2, count), true);
}

void embedding(OperatorCall& call) {
  const auto weight = call.tensor("weight");
  const auto indices = call.tensor("indices");
  const ValueId result = call.make(call.shapes().front());
  if (weight && indices) {
    call.record(
        {.results = {result},
         .inputs = {{*weight, Flow::Make}},
         .saved = {*indices}});
  }
  call.give(result);
}

void dropout(OperatorCall& call, bool is_in_place) {
  const ValueId input = call.tensors().front();
  const TensorShape& shape = call.shapes().front();
  if (!call.flag("train").value_or(true) || call.number("p") == 0.0) {
    call.give(call.view(input, shape));
    return;
  }
  const ValueId noise = call.device() == Device::Cpu
      ? call.make(shape)
      : make_bytes(call, shape.numel());
  const ValueId result =
      is_in_place ? call.detached(input, shape) : call.make(shape);
  call.record(
      {.results = {result}, .inputs = {{input, Flow::Make}}, .saved = {noise}});
  call.give(result);
}

/// softmax(dtype) casts its input first.
void softmax(OperatorCall& call) {
  const TensorShape& shape = call.shapes().front();
  const ValueId input = cast(call, call.tensors().front(), shape.dtype);
  const ValueId result = call.make(shape);
  call.record(
      {.results = {result},
       .inputs = {{input, Flow::Make}},
       .saved = {result}});
  call.give(result);
}

void max_pool(OperatorCall& call) {
  const ValueId input = call.tensors().front();
  const TensorShape& shape = call.shapes().front();
  const ValueId result = call.make(shape);
  const ValueId places = make_bytes(call, times(shape.numel(), kIndexBytes));
  call.record(
      {.results = {result},
       .inputs = {{input, Flow::Make}},
       .saved = {input, places}});
  call.give(result);
}

/// A pool of one element is a mean, which saves nothing.
void adaptive_pool(OperatorCall& call) {
  const ValueId input = call.tensors().front();
  const TensorShape& shape = call.shapes().front();
  const ValueId result = call.make(shape);
  const size_t rank = shape.sizes.size();
  const bool is_mean = rank > 0 && shape.sizes.back() == 1 &&
      (rank < 4 || shape.sizes[rank - 2] == 1);
  GradNode node{
      .results = {result}, .inputs = {{input, Flow::Make}}, .saved = {}};
  if (!is_mean) {
    node.saved.push_back(input);
  }
  call.record(std::move(node));
  call.give(result);
}

} // namespace

bool apply_layer_rule(std::string_view name, OperatorCall& call) {
  const std::vector<ValueId>& tensors = call.tensors();
  if (call.shapes().empty() || tensors.empty()) {
    return false;
  }
  constexpr std::array<std::string_view, 7> kConvolutions{
      "conv1d",
      "conv2d",
      "conv3d",
      "conv_transpose1d",
      "conv_transpose2d",
      "conv_transpose3d",
      "convolution"};
  const auto is_among = [&](const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_among(kConvolutions)) {
    convolution(call);
  } else if (name == "layer_norm") {
    layer_norm(call);
  } else if (name == "group_norm") {
    group_norm(call);
  } else if (name == "batch_norm") {
    batch_norm(call);
  } else if (name == "rms_norm") {
    rms_norm(call);
  } else if (name == "instance_norm") {
    instance_norm(call);
  } else if (name == "embedding") {
    embedding(call);
  } else if (name == "dropout" || name == "dropout_") {
    dropout(call, name == "dropout_");
  } else if (name == "softmax" || name == "log_softmax") {
    softmax(call);
  } else if (name == "max_pool2d" || name == "max_pool1d") {
    max_pool(call);
  } else if (name == "adaptive_avg_pool2d" || name == "adaptive_avg_pool1d") {
    adaptive_pool(call);
  } else {
    return false;
  }
  return !call.given().empty();
}

} // namespace tessera::plan
