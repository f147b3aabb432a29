// A kernel for the middle of linear_cross_entropy, between its products of
// matrices: two passes over the logits in place of a dozen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "libtorch/kernel_target.h"
#include "nn/chunked_loss.h"

namespace tessera::nn {

/// Rows of logits begin at multiples of this many bytes, and the memory of the
/// last row ends at such a multiple.
constexpr int64_t kRowAlignment = 16;

/// The tokens of a chunk. All tensors except the logits are contiguous; factors
/// and values of classes are float32.
struct LogitsChunk {
  at::Tensor logits; // (tokens, classes): become their gradients, if wanted
  at::Tensor bias; // (classes) or undefined
  at::Tensor class_weight; // (classes) or undefined
  at::Tensor targets; // (tokens)
  at::Tensor losses; // (tokens), to be written; undefined: none wanted
  Factors loss; // of each token
  Factors gradient; // likewise; of_softmax is undefined: none wanted
};

class CrossEntropyKernel {
 public:
  virtual ~CrossEntropyKernel() = default;
  virtual void run(const LogitsChunk& chunk) const = 0;
};

/// The kernel for logits of this dtype on this device, which lives as long as
/// the process. Null if there is none: on a CPU, for dtypes other than float32
/// and bfloat16, in a build without CUDA's headers, and where the kernel could
/// not be compiled; one warning of the process says so on a GPU.
const CrossEntropyKernel* cross_entropy_kernel(
    at::Device device,
    at::ScalarType dtype);

/// The same for CUDA, in cuda_cross_entropy_kernel.cpp or
/// no_cuda_cross_entropy_kernel.cpp; throws if there is none.
std::unique_ptr<CrossEntropyKernel> make_cuda_cross_entropy_kernel(
    at::Device device,
    at::ScalarType dtype);

/// What NVRTC makes of the kernel. Only in a build with CUDA's headers; needs
/// no GPU.
std::string compile_cross_entropy(
    const libtorch::KernelTarget& target,
    at::ScalarType dtype);

using FindKernel =
    std::function<const CrossEntropyKernel*(at::Device, at::ScalarType)>;
/// Asked before any other as long as it is set; empty: none.
void set_cross_entropy_kernel_for_tests(FindKernel find);

} // namespace tessera::nn
