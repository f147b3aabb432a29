#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/enum.h>

#include <cstdint>
#include <optional>
#include <variant>

namespace tessera {

/// Options of linear_cross_entropy(), with the names and defaults of Python's
/// torch.nn.functional.linear_cross_entropy.
struct TESSERA_API LinearCrossEntropyOptions {
  /// How the losses of the tokens are put together.
  using Reduction = std::variant<
      torch::enumtype::kNone,
      torch::enumtype::kMean,
      torch::enumtype::kSum>;

  /// Added to the logits: (classes). Undefined: nothing is added.
  TORCH_ARG(at::Tensor, linear_bias) = {};
  /// How much each class counts: (classes). Undefined: all alike.
  TORCH_ARG(at::Tensor, weight) = {};
  /// torch::kMean: the mean over the tokens that are not ignored, weighted by
  /// `weight`; torch::kSum; torch::kNone: a loss for each token.
  TORCH_ARG(Reduction, reduction) = torch::kMean;
  /// Tokens with this target are ignored.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// 0 to 1: the part of each target that is spread evenly over all classes.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// How many tokens have their logits in memory at a time. By default so few
  /// that these logits have no more elements than `hidden`, but at least 128
  /// tokens on a CPU, and on a GPU half of all tokens, within 1,024 and 4,096.
  TORCH_ARG(std::optional<int64_t>, batch_chunk_size) = std::nullopt;
};

/// cross_entropy_loss(linear(hidden, weight), targets) without the logits: the
/// tokens are taken in chunks, and only the logits of a chunk are held. The
/// last layer and the loss of a language model, whose logits are its largest
/// tensor.
///
/// `hidden` is (..., width), `weight` (classes, width), `targets` (...) with
/// the class of each token, int64. `weight` may be a sharded parameter, also
/// one that is the embedding too: its unit is gathered once. The loss is
/// float32 where `hidden` is float16 or bfloat16.
///
/// Gradients are made in forward, chunk by chunk, for those of `hidden`,
/// `weight` and `linear_bias` that require one, and only with grad mode on.
/// Backward multiplies them by the gradient of the loss; the products of a
/// chunk are computed once. With torch::kNone backward computes the chunks
/// again, since the gradient of each loss is not known before. The gradients of
/// `weight` and `linear_bias` are added up in float32, in double for double; on
/// devices other than CPUs and CUDA's the part of a chunk is rounded to the
/// dtype of the products first.
/// Memory: logits of a chunk twice, the gradients, and for float16 and bfloat16
/// on a CPU a float32 copy of `weight`, since the products are float32 there;
/// under autocast on a GPU a copy of `weight` in autocast's dtype.
/// Under autocast products have autocast's dtype; double stays double.
///
/// Throws c10::ValueError and c10::TypeError for shapes, dtypes and options
/// that do not fit, c10::IndexError for a target that is no class (tensors on a
/// CPU; elsewhere that is an error of the device, as for LibTorch's loss).
/// Targets that are probabilities of classes, and backward with create_graph,
/// throw c10::NotImplementedError. Not collective
/// in itself; with a sharded `weight` it is, as any use of one is.
TESSERA_API at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LinearCrossEntropyOptions& options = {});

} // namespace tessera
