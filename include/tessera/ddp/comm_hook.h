#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace tessera {

/// Gradients that are reduced together, as a communication hook sees them. All
/// are of one dtype and device.
class TESSERA_API GradBucket {
 public:
  /// For the code that reduces; hooks receive a bucket.
  GradBucket(
      size_t index,
      bool is_last,
      at::Tensor buffer,
      std::vector<at::Tensor> gradients,
      std::vector<at::Tensor> parameters)
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)) {}

  /// Its place in the order in which buckets are reduced, from 0.
  size_t index() const {
    return index_;
  }
  /// Whether this is the last bucket of this backward.
  bool is_last() const {
    return is_last_;
  }
  /// This rank's gradients one after another, flat; not divided by anything.
  const at::Tensor& buffer() const {
    return buffer_;
  }
  /// Views of the buffer, each in the shape of its parameter.
  const std::vector<at::Tensor>& gradients() const {
    return gradients_;
  }
  /// The parameters that the gradients belong to, in the same order.
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
};

/// Called once, at the end of backward, bucket by bucket: waits, and returns
/// the new gradients: a tensor like the bucket's buffer, or the buffer itself.
/// A hook that wraps another hook may call the other's future sooner.
using CommFuture = std::function<at::Tensor()>;

/// Reduces a bucket in place of the average over all ranks. Called during
/// backward as soon as the gradients have arrived, in the same order on every
/// rank; it starts its work and returns at once. What the hook or its future
/// throws, backward throws at its end, and the other ranks throw an error that
/// mentions it. The process group is dead afterwards, unless the hook itself
/// threw on all ranks.
using CommHook = std::function<CommFuture(GradBucket& bucket)>;

/// Averages over the ranks, as is done without a hook.
TESSERA_API CommHook allreduce_hook(const Group& group);
/// The same with 2 bytes per element.
TESSERA_API CommHook fp16_compress_hook(const Group& group);
TESSERA_API CommHook bf16_compress_hook(const Group& group);

} // namespace tessera
