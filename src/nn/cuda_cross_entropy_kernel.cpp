// The kernel on a GPU: compiled by NVRTC, which comes with LibTorch.
#include <tessera/error.h>

#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <string>
#include <vector>

#include "nn/cross_entropy_kernel.h"
#include "nn/kernel_text.h"

namespace tessera::nn {
namespace {

constexpr int kThreads = 512;
constexpr const char* kCall = "linear_cross_entropy";

/// A library that LibTorch has loaded; of names, the first that is there.
void* open_library(const std::vector<std::string>& names) {
  for (const int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
    for (const std::string& name : names) {
      if (void* library = dlopen(name.c_str(), flags)) {
        return library;
      }
    }
  }
  raise({.call = kCall}, names.front() + " cannot be loaded.");
}

template <class Function>
void find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    raise({.call = kCall}, std::string(name) + " is not there.");
  }
}

/// nvrtc.h is not in all packages that bring CUDA's headers.
struct Nvrtc {
  using Program = struct NvrtcProgram*;

  int (*create)(
      Program*,
      const char* source,
      const char* name,
      int num_headers,
      const char* const* headers,
      const char* const* include_names);
  int (*compile)(Program, int num_options, const char* const* options);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*destroy)(Program*);
  const char* (*error_text)(int);

  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }
  void check(int result, const char* what) const {
    if (result != 0) {
      raise(
          {.call = kCall},
          std::string(what) + " failed: " + error_text(result) + ".");
    }
  }

 private:
  Nvrtc() {
    at::globalContext().getNVRTC(); // LibTorch knows where it is
    constexpr int kMajor = CUDART_VERSION / 1000;
    void* library = open_library({"libnvrtc.so." + std::to_string(kMajor)});
    find_function(library, "nvrtcCreateProgram", create);
    find_function(library, "nvrtcCompileProgram", compile);
    find_function(library, "nvrtcGetProgramLogSize", log_size);
    find_function(library, "nvrtcGetProgramLog", log);
    find_function(library, "nvrtcGetCUBINSize", cubin_size);
    find_function(library, "nvrtcGetCUBIN", cubin);
    find_function(library, "nvrtcDestroyProgram", destroy);
    find_function(library, "nvrtcGetErrorString", error_text);
  }
};

/// The part of CUDA's driver that runs a kernel.
struct Driver {
  decltype(&cuDeviceGet) device;
  decltype(&cuDeviceGetAttribute) attribute;
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) function;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuGetErrorString) error_text;

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
  void check(CUresult result, const char* what) const {
    if (result != CUDA_SUCCESS) {
      const char* text = nullptr;
      error_text(result, &text);
      raise(
          {.call = kCall},
          std::string(what) +
              " failed: " + (text != nullptr ? text : "unknown error") + ".");
    }
  }

 private:
  Driver() {
    void* library = open_library({"libcuda.so.1"});
    find_function(library, "cuDeviceGet", device);
    find_function(library, "cuDeviceGetAttribute", attribute);
    find_function(library, "cuModuleLoadData", load);
    find_function(library, "cuModuleGetFunction", function);
    find_function(library, "cuLaunchKernel", launch);
    find_function(library, "cuGetErrorString", error_text);
  }
};

std::string architecture_of(at::Device device) {
  const Driver& driver = Driver::get();
  CUdevice number = 0;
  int major = 0;
  int minor = 0;
  driver.check(driver.device(&number, device.index()), "cuDeviceGet");
  driver.check(
      driver.attribute(
          &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, number),
      "cuDeviceGetAttribute");
  driver.check(
      driver.attribute(
          &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, number),
      "cuDeviceGetAttribute");
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

/// The machine code of the kernel for this device.
std::string compile(at::Device device, at::ScalarType dtype) {
  const Nvrtc& nvrtc = Nvrtc::get();
  const std::string source = "#define BFLOAT16 " +
      std::string(dtype == at::kBFloat16 ? "1" : "0") + "\n#define THREADS " +
      std::to_string(kThreads) + "\n" + std::string(kCrossEntropyCu);
  const std::string architecture =
      "--gpu-architecture=" + architecture_of(device);
  const std::array<const char*, 2> options{architecture.c_str(), "--std=c++17"};
  Nvrtc::Program program = nullptr;
  nvrtc.check(
      nvrtc.create(
          &program, source.c_str(), "cross_entropy.cu", 0, nullptr, nullptr),
      "nvrtcCreateProgram");
  const std::unique_ptr<Nvrtc::Program, decltype(nvrtc.destroy)> destroyed(
      &program, nvrtc.destroy);
  if (nvrtc.compile(
          program, static_cast<int>(options.size()), options.data()) != 0) {
    size_t size = 0;
    nvrtc.check(nvrtc.log_size(program, &size), "nvrtcGetProgramLogSize");
    std::string log(size, '\0');
    nvrtc.check(nvrtc.log(program, log.data()), "nvrtcGetProgramLog");
    raise({.call = kCall}, "NVRTC refuses the kernel: " + log);
  }
  size_t size = 0;
  nvrtc.check(nvrtc.cubin_size(program, &size), "nvrtcGetCUBINSize");
  std::string code(size, '\0');
  nvrtc.check(nvrtc.cubin(program, code.data()), "nvrtcGetCUBIN");
  return code;
}

class CudaCrossEntropyKernel : public CrossEntropyKernel {
 public:
  CudaCrossEntropyKernel(at::Device device, at::ScalarType dtype) {
    const c10::cuda::CUDAGuard on_device(device);
    const Driver& driver = Driver::get();
    const std::string code = compile(device, dtype);
    CUmodule module = nullptr; // for good
    driver.check(driver.load(&module, code.data()), "cuModuleLoadData");
    driver.check(
        driver.function(&function_, module, "cross_entropy"),
        "cuModuleGetFunction");
  }

  void run(const LogitsChunk& chunk) const override {
    if (chunk.logits.size(0) == 0) {
      return;
    }
    const c10::cuda::CUDAGuard on_device(chunk.logits.device());
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
    const Driver& driver = Driver::get();
    driver.check(
        driver.launch(
            function_,
            static_cast<unsigned>(chunk.logits.size(0)),
            1,
            1,
            kThreads,
            1,
            1,
            /*sharedMemBytes=*/0,
            c10::cuda::getCurrentCUDAStream().stream(),
            arguments.data(),
            nullptr),
        "cuLaunchKernel");
  }

 private:
  static const void* address(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  }

  CUfunction function_ = nullptr;
};

} // namespace

std::unique_ptr<CrossEntropyKernel> make_cuda_cross_entropy_kernel(
    at::Device device,
    at::ScalarType dtype) {
  return std::make_unique<CudaCrossEntropyKernel>(device, dtype);
}

} // namespace tessera::nn
