// The kernel on a GPU.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <memory>
#include <string>

#include "libtorch/cuda_kernel.h"
#include "nn/cross_entropy_kernel.h"
#include "nn/kernel_text.h"

namespace tessera::nn {
namespace {

constexpr unsigned kThreads = 512;

libtorch::KernelSource source_for(at::ScalarType dtype) {
  return {
      .call = "linear_cross_entropy",
      .function = "cross_entropy",
      .text = "#define BFLOAT16 " +
          std::string(dtype == at::kBFloat16 ? "1" : "0") +
          "\n#define THREADS " + std::to_string(kThreads) + "\n" +
          std::string(kCrossEntropyCu)};
}

class CudaCrossEntropyKernel : public CrossEntropyKernel {
 public:
  CudaCrossEntropyKernel(at::Device device, at::ScalarType dtype)
      : kernel_(device, source_for(dtype)) {}

  void run(const LogitsChunk& chunk) const override {
    if (chunk.logits.size(0) == 0) {
      return;
    }
    const c10::DeviceGuard on_device(chunk.logits.device());
    void* logits = chunk.logits.data_ptr();
    long long stride = chunk.logits.stride(0);
    int classes = static_cast<int>(chunk.logits.size(1));
    const void* bias = address(chunk.bias);
    const void* class_weight = address(chunk.class_weight);
    const void* targets = address(chunk.targets);
    const void* loss_at_target = address(chunk.loss.at_target);
    const void* loss_even = address(chunk.loss.even);
    void* losses = chunk.losses.defined() ? chunk.losses.data_ptr() : nullptr;
    const void* at_target = address(chunk.gradient.at_target);
    const void* even = address(chunk.gradient.even);
    const void* of_softmax = address(chunk.gradient.of_softmax);
    // In the order of the kernel's parameters.
    std::array<void*, 12> arguments{
        &logits,
        &stride,
        &classes,
        &bias,
        &class_weight,
        &targets,
        &loss_at_target,
        &loss_even,
        &losses,
        &at_target,
        &even,
        &of_softmax};
    kernel_.launch(
        static_cast<unsigned>(chunk.logits.size(0)), kThreads, arguments);
  }

 private:
  static const void* address(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  }

  const libtorch::CudaKernel kernel_;
};

} // namespace

std::string compile_cross_entropy(
    const libtorch::KernelTarget& target,
    at::ScalarType dtype) {
  return libtorch::compile_kernel(source_for(dtype), target);
}

std::unique_ptr<CrossEntropyKernel> make_cuda_cross_entropy_kernel(
    at::Device device,
    at::ScalarType dtype) {
  return std::make_unique<CudaCrossEntropyKernel>(device, dtype);
}

} // namespace tessera::nn
