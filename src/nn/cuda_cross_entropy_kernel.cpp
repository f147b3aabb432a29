// The kernel on a GPU: compiled by NVRTC, which comes with LibTorch.
//
// CUDA's runtime is called through LibTorch alone: programs do not link it.
#include <tessera/error.h>

#include <ATen/DynamicLibrary.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <memory>
#include <string>

#include "nn/cross_entropy_kernel.h"
#include "nn/kernel_text.h"

namespace tessera::nn {
namespace {

constexpr int kThreads = 512;
constexpr const char* kCall = "linear_cross_entropy";

/// A library that LibTorch brings or uses. LibTorch opens it, since only
/// LibTorch knows the folders of the others' wheels. Never closed.
class Library {
 public:
  explicit Library(const std::string& name)
      : library_(name.c_str(), /*alt_name=*/nullptr, /*leak_handle=*/true) {}

  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(library_.sym(name));
  }

 private:
  at::DynamicLibrary library_;
};

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
  int (*version)(int* major, int* minor);
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
    const long cuda = at::detail::getCUDAHooks().versionCUDART();
    Library library("libnvrtc.so." + std::to_string(cuda / 1000));
    library.find("nvrtcCreateProgram", create);
    library.find("nvrtcCompileProgram", compile);
    library.find("nvrtcGetProgramLogSize", log_size);
    library.find("nvrtcGetProgramLog", log);
    library.find("nvrtcGetCUBINSize", cubin_size);
    library.find("nvrtcGetCUBIN", cubin);
    library.find("nvrtcDestroyProgram", destroy);
    library.find("nvrtcVersion", version);
    library.find("nvrtcGetErrorString", error_text);
    open_builtins();
  }

  /// NVRTC opens this library by its name alone. In wheels it lies beside
  /// NVRTC, where nobody looks, unless it has been opened already.
  void open_builtins() const {
    int major = 0;
    int minor = 0;
    check(version(&major, &minor), "nvrtcVersion");
    Dl_info nvrtc{};
    if (dladdr(reinterpret_cast<void*>(compile), &nvrtc) == 0) {
      return;
    }
    const auto builtins =
        std::filesystem::path(nvrtc.dli_fname)
            .replace_filename(
                "libnvrtc-builtins.so." + std::to_string(major) + "." +
                std::to_string(minor));
    dlopen(builtins.c_str(), RTLD_NOW); // for good; NVRTC says if it has none
  }
};

/// The part of CUDA's driver that runs a kernel.
struct Driver {
  decltype(&cuDeviceGet) device;
  decltype(&cuDeviceGetAttribute) attribute;
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) function;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
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
    Library library("libcuda.so.1");
    library.find("cuDeviceGet", device);
    library.find("cuDeviceGetAttribute", attribute);
    library.find("cuModuleLoadData", load);
    library.find("cuModuleGetFunction", function);
    library.find("cuLaunchKernel", launch);
    library.find("cuThreadExchangeStreamCaptureMode", exchange_capture_mode);
    library.find("cuGetErrorString", error_text);
  }
};

/// As NVRTC names what this device runs.
std::string sm_of(at::Device device) {
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

} // namespace

std::string compile_cross_entropy(const std::string& sm, at::ScalarType dtype) {
  const Nvrtc& nvrtc = Nvrtc::get();
  const std::string source = "#define BFLOAT16 " +
      std::string(dtype == at::kBFloat16 ? "1" : "0") + "\n#define THREADS " +
      std::to_string(kThreads) + "\n" + std::string(kCrossEntropyCu);
  const std::string architecture = "--gpu-architecture=" + sm;
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

namespace {

/// Loading a module is no work of a stream, so it is allowed while a step is
/// being captured.
class OutsideOfCapture {
 public:
  OutsideOfCapture() {
    driver_.check(
        driver_.exchange_capture_mode(&mode_),
        "cuThreadExchangeStreamCaptureMode");
  }
  ~OutsideOfCapture() {
    driver_.exchange_capture_mode(&mode_);
  }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  const Driver& driver_ = Driver::get();
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

class CudaCrossEntropyKernel : public CrossEntropyKernel {
 public:
  CudaCrossEntropyKernel(at::Device device, at::ScalarType dtype) {
    const c10::DeviceGuard on_device(device);
    // The guard alone gives no context to a thread that is on the device.
    C10_CUDA_CHECK(c10::cuda::SetDevice(device.index(), /*force=*/true));
    const OutsideOfCapture outside;
    const Driver& driver = Driver::get();
    const std::string code = compile_cross_entropy(sm_of(device), dtype);
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
