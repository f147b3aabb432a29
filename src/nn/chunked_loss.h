// The cross entropy of a linear layer, a chunk of tokens at a time.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

/// [Note: dtypes of a chunked loss]
///
/// `product`: the products with the weight. It is the dtype that a linear layer
/// would compute in, but float32 in place of float16 and bfloat16 on a CPU,
/// whose products of these are slow where the processor has no instructions for
/// them.
///
/// `sum`: softmax, losses, and what is added up over chunks: float32 in place
/// of float16 and bfloat16. The gradients of weight and bias stay in it until
/// the gradient of the loss is known: a scaled loss keeps small gradients from
/// vanishing in float16 only if they have not vanished before.
struct LossDtypes {
  at::ScalarType product;
  at::ScalarType sum;
};

/// What a loss is computed of. No tensor of it requires a gradient, and
/// autocast is off.
struct LossInputs {
  at::Tensor hidden; // (tokens, width)
  at::Tensor weight; // (classes, width); may be a face
  at::Tensor bias; // (classes) or undefined
  at::Tensor targets; // (tokens), int64
  at::Tensor class_weight; // (classes) or undefined
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  int64_t chunk = 1; // tokens
  LossDtypes dtypes{at::kFloat, at::kFloat};

  int64_t tokens() const {
    return hidden.size(0);
  }
  int64_t classes() const {
    return weight.size(0);
  }
};

/// The factors of each token's loss, (tokens) each.
///
/// With `w` the weights of the classes, `C` their number, `e` the smoothing and
/// `logp` the logarithms of a token's probabilities, its loss is
///   - at_target * logp[target] - even * sum(w * logp)
/// with at_target = (1 - e) * w[target] and even = e / C. Its derivative by
/// logit j is, with p = exp(logp),
///   of_softmax * p[j] - (j == target) * at_target - even * w[j]
/// with of_softmax = at_target + even * sum(w). All are 0 for a token that is
/// ignored.
struct Factors {
  at::Tensor at_target;
  at::Tensor even; // undefined without smoothing
  at::Tensor of_softmax;

  /// The factors of `count` tokens, from `begin` on.
  Factors narrow(int64_t begin, int64_t count) const;
};

/// Which gradients to make.
struct WantedGradients {
  bool hidden = false;
  bool weight = false;
  bool bias = false;

  bool any() const {
    return hidden || weight || bias;
  }
};

/// The loss, (tokens) or a scalar, in `sum`, and the gradients that were asked
/// for; others are undefined.
struct LossAndGradients {
  at::Tensor loss;
  at::Tensor hidden; // its dtype, but float32 for float16
  at::Tensor weight; // in `sum`
  at::Tensor bias; // in `sum`
};

/// The loss, and its gradients, which is not for Reduction::None.
LossAndGradients chunked_loss(
    const LossInputs& inputs,
    const WantedGradients& wanted);

/// The gradients for losses of Reduction::None whose gradients are `upstream`,
/// (tokens). The loss of the result is undefined.
LossAndGradients chunked_gradients(
    const LossInputs& inputs,
    const WantedGradients& wanted,
    const at::Tensor& upstream);

} // namespace tessera::nn
