#include <tessera/error.h>
#include <tessera/nn/linear_cross_entropy.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <sstream>
#include <string>
#include <utility>

#include "engine/unit.h"
#include "engine/unit_params.h"
#include "nn/chunk_size.h"
#include "nn/chunked_loss.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCall = "linear_cross_entropy";

template <class E>
[[noreturn]] void refuse(const std::string& what) {
  raise<E>({.call = kCall}, what);
}

template <class T>
std::string text_of(const T& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

/// Whether a linear layer with this weight would cast the other operand: see
/// [Note: operands under mixed precision].
bool casts_operands(const at::Tensor& weight) {
  const engine::Unit* unit = engine::unit_of(weight);
  return unit != nullptr && unit->options().param_dtype.has_value();
}

bool is_low_precision(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_shapes(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets) {
  if (hidden.dim() < 1) {
    refuse<c10::ValueError>("hidden is a scalar; expected (..., width).");
  }
  if (weight.dim() != 2 || weight.size(1) != hidden.size(-1)) {
    refuse<c10::ValueError>(
        "weight has the shape " + text_of(weight.sizes()) +
        "; expected (classes, " + std::to_string(hidden.size(-1)) +
        ") for hidden of the shape " + text_of(hidden.sizes()) + ".");
  }
  if (targets.is_floating_point()) {
    refuse<c10::NotImplementedError>(
        "targets are of " + text_of(targets.scalar_type()) +
        ": probabilities of classes are not supported. Use torch::cross_entropy_loss(torch::linear(hidden, weight), targets).");
  }
  if (targets.scalar_type() != at::kLong) {
    refuse<c10::TypeError>(
        "targets are of " + text_of(targets.scalar_type()) +
        "; expected int64. Call targets.to(torch::kLong).");
  }
  if (targets.sizes() != hidden.sizes().slice(0, hidden.dim() - 1)) {
    refuse<c10::ValueError>(
        "targets have the shape " + text_of(targets.sizes()) +
        "; expected one target for each token of hidden, which has the shape " +
        text_of(hidden.sizes()) + ".");
  }
}

void check_by_class(
    const char* name,
    const at::Tensor& values,
    const at::Tensor& weight) {
  if (!values.defined()) {
    return;
  }
  const int64_t classes = weight.size(0);
  if (values.dim() != 1 || values.size(0) != classes) {
    refuse<c10::ValueError>(
        std::string(name) + " has the shape " + text_of(values.sizes()) +
        "; expected (" + std::to_string(classes) +
        "): a value for each class.");
  }
  if (values.device() != weight.device()) {
    refuse<c10::ValueError>(
        std::string(name) + " is on " + values.device().str() +
        ", and weight on " + weight.device().str() +
        ". Put both on one device.");
  }
}

void check_options(
    const LinearCrossEntropyOptions& options,
    const at::Tensor& weight) {
  check_by_class("linear_bias", options.linear_bias(), weight);
  check_by_class("weight of the options", options.weight(), weight);
  const double smoothing = options.label_smoothing();
  if (!(smoothing >= 0 && smoothing <= 1)) {
    refuse<c10::ValueError>(
        "label_smoothing is " + text_of(smoothing) + "; expected 0 to 1.");
  }
  if (options.batch_chunk_size().value_or(1) < 1) {
    refuse<c10::ValueError>(
        "batch_chunk_size is " + text_of(*options.batch_chunk_size()) +
        "; expected 1 or more.");
  }
}

/// Throws where an operator would read the weight of no class. Elsewhere than
/// on a CPU that would wait for the device.
void check_classes(
    const at::Tensor& targets,
    int64_t ignore_index,
    int64_t classes) {
  if (!targets.is_cpu()) {
    return;
  }
  const at::Tensor contiguous = targets.contiguous();
  const auto* values = contiguous.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < contiguous.numel(); ++i) {
    if (values[i] != ignore_index && (values[i] < 0 || values[i] >= classes)) {
      refuse<c10::IndexError>(
          "target " + std::to_string(i) + " is " + std::to_string(values[i]) +
          ", and there are " + std::to_string(classes) +
          " classes, counted from 0. Set ignore_index for tokens without a target.");
    }
  }
}

/// The dtype in which torch::linear(hidden, weight) would compute.
at::ScalarType linear_dtype(
    const at::Tensor& hidden,
    const at::Tensor& weight) {
  const auto device = hidden.device().type();
  const bool has_double = hidden.scalar_type() == at::kDouble ||
      weight.scalar_type() == at::kDouble;
  if (at::autocast::is_autocast_enabled(device) && !has_double) {
    return at::autocast::get_autocast_dtype(device);
  }
  if (hidden.scalar_type() != weight.scalar_type() && !casts_operands(weight)) {
    refuse<c10::TypeError>(
        "hidden is of " + text_of(hidden.scalar_type()) + " and weight of " +
        text_of(weight.scalar_type()) + ". Cast one of them, or use autocast.");
  }
  return weight.scalar_type();
}

LossDtypes dtypes_of(const at::Tensor& hidden, const at::Tensor& weight) {
  const at::ScalarType dtype = linear_dtype(hidden, weight);
  if (!is_low_precision(dtype)) {
    return {dtype, dtype};
  }
  return {hidden.is_cpu() ? at::kFloat : dtype, at::kFloat};
}

int64_t chunk_of(
    const at::Tensor& hidden,
    int64_t classes,
    std::optional<int64_t> wanted) {
  return wanted.value_or(
      usual_chunk(hidden.size(0), hidden.size(1), classes, hidden.is_cpu()));
}

/// Inside the function dtypes are chosen already.
class WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

void refuse_create_graph() {
  if (at::GradMode::is_enabled()) {
    refuse<c10::NotImplementedError>(
        "a backward with create_graph=true is not supported, since gradients are made in forward. Use torch::cross_entropy_loss(torch::linear(hidden, weight), targets).");
  }
}

/// The tensors that may require gradients go to apply() by themselves, in the
/// order of these.
constexpr size_t kNumGradients = 3; // hidden, weight, bias

/// With gradients made in forward.
struct ReducedLoss : torch::autograd::Function<ReducedLoss> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& hidden,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      const LossInputs& inputs,
      const WantedGradients& wanted) {
    const WithoutAutocast without_autocast;
    LossAndGradients result = chunked_loss(inputs, wanted);
    auto& saved = context->saved_data;
    save(saved, "hidden", result.hidden, hidden);
    save(saved, "weight", result.weight, weight);
    if (bias) {
      save(saved, "bias", result.bias, *bias);
    }
    return result.loss;
  }

  static variable_list backward(
      AutogradContext* context,
      const variable_list& gradients) {
    refuse_create_graph();
    const WithoutAutocast without_autocast;
    auto& saved = context->saved_data;
    variable_list results(kNumGradients + 2);
    size_t next = 0;
    for (const char* name : {"hidden", "weight", "bias"}) {
      results[next++] = take(saved, name, gradients.front());
    }
    return results;
  }

 private:
  using Saved = decltype(AutogradContext::saved_data);

  static void save(
      Saved& saved,
      const std::string& name,
      const at::Tensor& gradient,
      const at::Tensor& of) {
    if (gradient.defined()) {
      saved[name] = gradient;
      saved[name + " dtype"] = static_cast<int64_t>(of.scalar_type());
    }
  }

  /// The gradient times that of the loss. Without retain_graph nobody asks for
  /// the gradient again, so its memory becomes that of the result.
  static at::Tensor take(
      Saved& saved,
      const std::string& name,
      const at::Tensor& of_loss) {
    if (!saved.count(name + " dtype")) {
      return {};
    }
    const auto entry = saved.find(name);
    if (entry == saved.end()) {
      refuse<c10::Error>(
          "backward was called a second time, and the gradients that forward made were used up by the first. Call the first one with retain_graph=true.");
    }
    const auto dtype =
        static_cast<at::ScalarType>(saved[name + " dtype"].toInt());
    at::Tensor gradient = entry->second.toTensor();
    if (torch::autograd::get_current_graph_task_keep_graph()) {
      return (gradient * of_loss).to(dtype);
    }
    saved.erase(entry);
    return gradient.mul_(of_loss).to(dtype);
  }
};

/// With a loss for each token: the chunks are computed again in backward.
struct LossByToken : torch::autograd::Function<LossByToken> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& hidden,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      const LossInputs& inputs) {
    const WithoutAutocast without_autocast;
    context->save_for_backward(
        {hidden,
         weight,
         bias.value_or(at::Tensor()),
         inputs.targets,
         inputs.class_weight});
    auto& saved = context->saved_data;
    saved["ignore_index"] = inputs.ignore_index;
    saved["label_smoothing"] = inputs.label_smoothing;
    saved["chunk"] = inputs.chunk;
    saved["product"] = static_cast<int64_t>(inputs.dtypes.product);
    saved["sum"] = static_cast<int64_t>(inputs.dtypes.sum);
    return chunked_loss(inputs, {}).loss;
  }

  static variable_list backward(
      AutogradContext* context,
      const variable_list& gradients) {
    refuse_create_graph();
    const WithoutAutocast without_autocast;
    auto& saved = context->saved_data;
    const variable_list tensors = context->get_saved_variables();
    const LossInputs inputs{
        .hidden = tensors[0],
        .weight = tensors[1],
        .bias = tensors[2],
        .targets = tensors[3],
        .class_weight = tensors[4],
        .reduction = at::Reduction::None,
        .ignore_index = saved["ignore_index"].toInt(),
        .label_smoothing = saved["label_smoothing"].toDouble(),
        .chunk = saved["chunk"].toInt(),
        .dtypes = {
            static_cast<at::ScalarType>(saved["product"].toInt()),
            static_cast<at::ScalarType>(saved["sum"].toInt())}};
    const WantedGradients wanted{
        .hidden = context->needs_input_grad(0),
        .weight = context->needs_input_grad(1),
        .bias = inputs.bias.defined() && context->needs_input_grad(2)};
    const LossAndGradients result =
        chunked_gradients(inputs, wanted, gradients.front());
    const auto as = [](const at::Tensor& gradient, const at::Tensor& of) {
      return gradient.defined() ? gradient.to(of.scalar_type()) : gradient;
    };
    return {
        as(result.hidden, inputs.hidden),
        as(result.weight, inputs.weight),
        as(result.bias, inputs.bias),
        at::Tensor()};
  }
};

/// What autograd does not see.
LossInputs detached(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LinearCrossEntropyOptions& options) {
  const at::Tensor& bias = options.linear_bias();
  return {
      .hidden = hidden.detach(),
      // Also gathers the unit, which may change what requires a gradient.
      .weight = weight.detach(),
      .bias = bias.defined() ? bias.detach() : bias,
      .targets = targets,
      .class_weight =
          options.weight().defined() ? options.weight().detach() : at::Tensor(),
      .reduction = torch::enumtype::reduction_get_enum(options.reduction()),
      .ignore_index = options.ignore_index(),
      .label_smoothing = options.label_smoothing(),
      .chunk = chunk_of(hidden, weight.size(0), options.batch_chunk_size()),
      .dtypes = dtypes_of(hidden, weight)};
}

at::Tensor loss_of_tokens(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LinearCrossEntropyOptions& options) {
  const LossInputs inputs = detached(hidden, weight, targets, options);
  const bool with_gradients = at::GradMode::is_enabled();
  const at::Tensor& bias = options.linear_bias();
  const WantedGradients wanted{
      .hidden = with_gradients && hidden.requires_grad(),
      .weight = with_gradients && weight.requires_grad(),
      .bias = with_gradients && bias.defined() && bias.requires_grad()};
  if (!wanted.any()) {
    const WithoutAutocast without_autocast;
    return chunked_loss(inputs, wanted).loss;
  }
  const auto some_bias =
      bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return inputs.reduction == at::Reduction::None
      ? LossByToken::apply(hidden, weight, some_bias, inputs)
      : ReducedLoss::apply(hidden, weight, some_bias, inputs, wanted);
}

} // namespace
} // namespace tessera::nn

namespace tessera {

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LinearCrossEntropyOptions& options) {
  nn::check_shapes(hidden, weight, targets);
  nn::check_options(options, weight);
  nn::check_classes(targets, options.ignore_index(), weight.size(0));
  const at::Tensor loss = nn::loss_of_tokens(
      hidden.reshape({-1, hidden.size(-1)}),
      weight,
      targets.reshape({-1}),
      options);
  return loss.dim() == 0 ? loss : loss.view(targets.sizes());
}

} // namespace tessera
