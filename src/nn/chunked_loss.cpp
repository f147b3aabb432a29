#include "nn/chunked_loss.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "nn/cross_entropy_kernel.h"

namespace tessera::nn {
namespace {

/// One computation: what stays the same from chunk to chunk, and the result.
class ChunkedLoss {
 public:
  ChunkedLoss(const LossInputs& inputs, const WantedGradients& wanted)
      : in_(inputs),
        wanted_(wanted),
        ignored_(inputs.targets == inputs.ignore_index),
        targets_(at::where(ignored_, 0, inputs.targets)),
        weight_(inputs.weight.to(inputs.dtypes.product)),
        kernel_(
            inputs.dtypes.sum == at::kFloat && inputs.classes() > 0
                ? cross_entropy_kernel(
                      inputs.hidden.device(),
                      inputs.dtypes.product)
                : nullptr) {
    bias_ = by_class(in_.bias);
    class_weight_ = by_class(in_.class_weight);
    target_weight_ = class_weight_.defined()
        ? class_weight_.index_select(0, targets_)
        : at::ones({in_.tokens()}, like(in_.dtypes.sum));
    target_weight_.masked_fill_(ignored_, 0);
    make_gradients();
    make_room();
  }

  /// What a mean is divided by: the weights of the tokens that count.
  at::Tensor divisor() const {
    return target_weight_.sum();
  }

  /// The loss of each token, (tokens), without gradients unless the gradients
  /// are wanted: those of the sum of the losses times `scale`, which is a
  /// scalar or (tokens).
  LossAndGradients run(bool with_loss, const at::Tensor& scale) {
    if (with_loss) {
      loss_factors_ = factors({});
      result_.loss = at::empty({in_.tokens()}, like(in_.dtypes.sum));
    }
    // The gradients of the logits would vanish in float16 if each were divided
    // by the number of tokens first.
    const bool is_late =
        in_.dtypes.product == at::kHalf && scale.defined() && scale.dim() == 0;
    if (wanted_.any()) {
      gradient_factors_ = factors(is_late ? at::Tensor() : scale);
    }
    for (int64_t begin = 0; begin < in_.tokens(); begin += in_.chunk) {
      add_chunk(begin, std::min(in_.chunk, in_.tokens() - begin));
    }
    if (is_late) {
      scale_gradients(scale);
    }
    return std::move(result_);
  }

 private:
  /// Values of the classes in the dtype of sums. A kernel reads memory, which a
  /// sharded parameter may let go of: it gets a copy.
  at::Tensor by_class(const at::Tensor& values) const {
    return values.defined()
        ? values.to(in_.dtypes.sum, /*non_blocking=*/false, kernel_ != nullptr)
              .contiguous()
        : values;
  }

  at::TensorOptions like(at::ScalarType dtype) const {
    return in_.hidden.options().dtype(dtype);
  }

  /// Ignored tokens are left out last: a mean over no token at all has an
  /// infinite scale.
  Factors factors(const at::Tensor& scale) const {
    const auto scaled = [&](const at::Tensor& factor) {
      return (scale.defined() ? factor * scale : factor)
          .masked_fill(ignored_, 0);
    };
    const double smoothing = in_.label_smoothing;
    Factors result{.at_target = scaled(target_weight_ * (1 - smoothing))};
    result.of_softmax = result.at_target;
    if (smoothing > 0) {
      const auto classes = static_cast<double>(in_.classes());
      result.even = scaled(
          at::ones({in_.tokens()}, like(in_.dtypes.sum)) *
          (smoothing / classes));
      result.of_softmax = result.at_target +
          (class_weight_.defined() ? result.even * class_weight_.sum()
                                   : result.even * classes);
    }
    return result;
  }

  void scale_gradients(const at::Tensor& scale) const {
    // Infinite for a mean over no token, whose gradients are zeros.
    const at::Tensor finite = scale.masked_fill(scale.isinf(), 0);
    for (const at::Tensor* gradient :
         {&result_.hidden, &result_.weight, &result_.bias}) {
      if (gradient->defined()) {
        gradient->mul_(finite);
      }
    }
  }

  void make_gradients() {
    if (wanted_.hidden) {
      const at::ScalarType dtype = in_.hidden.scalar_type();
      result_.hidden = at::empty(
          in_.hidden.sizes(), like(dtype == at::kHalf ? at::kFloat : dtype));
    }
    if (wanted_.weight) {
      result_.weight = at::zeros(in_.weight.sizes(), like(in_.dtypes.sum));
    }
    if (wanted_.bias) {
      result_.bias = at::zeros({in_.classes()}, like(in_.dtypes.sum));
    }
  }

  /// Logits for a kernel, whose rows begin at aligned places: matrix products
  /// of bfloat16 like that, too.
  void make_room() {
    if (kernel_ == nullptr) {
      return;
    }
    const int64_t pack =
        kRowAlignment / static_cast<int64_t>(weight_.element_size());
    const int64_t stride = (in_.classes() + pack - 1) / pack * pack;
    room_ = at::empty(
                {std::min(in_.chunk, in_.tokens()), stride},
                like(in_.dtypes.product))
                .narrow(1, 0, in_.classes());
  }

  void add_chunk(int64_t begin, int64_t count) {
    const at::Tensor hidden =
        in_.hidden.narrow(0, begin, count).to(in_.dtypes.product);
    const at::Tensor of_logits = kernel_ != nullptr
        ? run_kernel(hidden, begin)
        : run_operators(hidden, begin);
    if (wanted_.any()) {
      add_gradients(of_logits, hidden, begin);
    }
  }

  /// Returns the gradients of the logits, if they are wanted.
  at::Tensor run_kernel(const at::Tensor& hidden, int64_t begin) const {
    const int64_t count = hidden.size(0);
    at::Tensor logits = room_.narrow(0, 0, count);
    at::mm_out(logits, hidden, weight_.t());
    LogitsChunk chunk{
        .logits = logits,
        .bias = bias_,
        .class_weight = class_weight_,
        .targets = targets_.narrow(0, begin, count)};
    if (result_.loss.defined()) {
      chunk.losses = result_.loss.narrow(0, begin, count);
      chunk.loss = loss_factors_.narrow(begin, count);
    }
    if (wanted_.any()) {
      chunk.gradient = gradient_factors_.narrow(begin, count);
    }
    kernel_->run(chunk);
    if (chunk.losses.defined()) {
      chunk.losses.masked_fill_(ignored_.narrow(0, begin, count), 0);
    }
    return logits;
  }

  /// The same.
  at::Tensor run_operators(const at::Tensor& hidden, int64_t begin) const {
    // First the logarithms of the probabilities, then, in the same memory, the
    // gradients of the logits.
    at::Tensor chunk = log_probabilities(hidden);
    if (result_.loss.defined()) {
      add_losses(chunk, begin);
    }
    if (wanted_.any()) {
      turn_into_gradients(chunk, begin);
    }
    return chunk;
  }

  at::Tensor log_probabilities(const at::Tensor& hidden) const {
    const at::Tensor logits = at::mm(hidden, weight_.t()).to(in_.dtypes.sum);
    if (bias_.defined()) {
      logits.add_(bias_);
    }
    return at::log_softmax(logits, 1);
  }

  void add_losses(const at::Tensor& log_probabilities, int64_t begin) const {
    const auto part = [&](const at::Tensor& of_all) {
      return of_all.narrow(0, begin, log_probabilities.size(0));
    };
    at::Tensor losses = log_probabilities.gather(1, part(targets_).unsqueeze(1))
                            .squeeze(1)
                            .mul_(part(loss_factors_.at_target));
    if (loss_factors_.even.defined()) {
      const at::Tensor over_classes = class_weight_.defined()
          ? log_probabilities.mv(class_weight_)
          : log_probabilities.sum(1);
      losses.add_(over_classes.mul_(part(loss_factors_.even)));
    }
    part(result_.loss).copy_(losses.neg_().masked_fill_(part(ignored_), 0));
  }

  void turn_into_gradients(const at::Tensor& log_probabilities, int64_t begin)
      const {
    const auto part = [&](const at::Tensor& of_all) {
      return of_all.narrow(0, begin, log_probabilities.size(0)).unsqueeze(1);
    };
    log_probabilities.exp_().mul_(part(gradient_factors_.of_softmax));
    log_probabilities.scatter_add_(
        1, part(targets_), part(gradient_factors_.at_target).neg());
    if (gradient_factors_.even.defined()) {
      const at::Tensor even = part(gradient_factors_.even);
      if (class_weight_.defined()) {
        log_probabilities.addr_(even.squeeze(1), class_weight_, 1, -1);
      } else {
        log_probabilities.sub_(even);
      }
    }
  }

  void add_gradients(
      const at::Tensor& of_logits,
      const at::Tensor& hidden,
      int64_t begin) const {
    const at::Tensor factor = of_logits.to(in_.dtypes.product);
    if (wanted_.hidden) {
      at::Tensor part = result_.hidden.narrow(0, begin, factor.size(0));
      if (part.scalar_type() == factor.scalar_type()) {
        at::mm_out(part, factor, weight_);
      } else {
        part.copy_(at::mm(factor, weight_));
      }
    }
    if (wanted_.weight) {
      add_weight_gradient(factor.t(), hidden);
    }
    if (wanted_.bias) {
      result_.bias.add_(of_logits.sum(0, /*keepdim=*/false, in_.dtypes.sum));
    }
  }

  /// No product of a chunk is rounded to the dtype of its factors, where
  /// LibTorch has one that adds to float32.
  void add_weight_gradient(const at::Tensor& factor, const at::Tensor& hidden)
      const {
    if (in_.dtypes.product == in_.dtypes.sum) {
      result_.weight.addmm_(factor, hidden);
    } else if (hidden.is_cuda()) {
      at::Tensor sum = result_.weight;
      at::addmm_out(sum, sum, factor, hidden, in_.dtypes.sum);
    } else {
      result_.weight.add_(at::mm(factor, hidden));
    }
  }

  const LossInputs& in_;
  const WantedGradients wanted_;
  const at::Tensor ignored_; // (tokens), bool
  const at::Tensor targets_; // 0 where they are ignored
  const at::Tensor weight_;
  const CrossEntropyKernel* const kernel_; // null: operators
  at::Tensor room_; // for a kernel
  at::Tensor bias_;
  at::Tensor class_weight_;
  at::Tensor target_weight_; // (tokens); 0 where they are ignored
  Factors loss_factors_;
  Factors gradient_factors_;
  LossAndGradients result_;
};

} // namespace

Factors Factors::narrow(int64_t begin, int64_t count) const {
  const auto part = [&](const at::Tensor& factor) {
    return factor.defined() ? factor.narrow(0, begin, count) : factor;
  };
  return {part(at_target), part(even), part(of_softmax)};
}

LossAndGradients chunked_loss(
    const LossInputs& inputs,
    const WantedGradients& wanted) {
  ChunkedLoss loss(inputs, wanted);
  if (inputs.reduction != at::Reduction::Mean) {
    LossAndGradients result = loss.run(/*with_loss=*/true, {});
    if (inputs.reduction == at::Reduction::Sum) {
      result.loss = result.loss.sum();
    }
    return result;
  }
  const at::Tensor divisor = loss.divisor();
  LossAndGradients result = loss.run(/*with_loss=*/true, divisor.reciprocal());
  result.loss = result.loss.sum().div_(divisor);
  return result;
}

LossAndGradients chunked_gradients(
    const LossInputs& inputs,
    const WantedGradients& wanted,
    const at::Tensor& upstream) {
  return ChunkedLoss(inputs, wanted)
      .run(/*with_loss=*/false, upstream.to(inputs.dtypes.sum));
}

} // namespace tessera::nn
