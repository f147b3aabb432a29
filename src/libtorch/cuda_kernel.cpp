// NVRTC comes with LibTorch. CUDA's runtime is called through LibTorch alone:
// programs do not link it.
#include "libtorch/cuda_kernel.h"

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

namespace tessera::libtorch {
namespace {

/// A library that LibTorch brings or uses. LibTorch opens it, since only
/// LibTorch knows the folders of the others' wheels. Never closed.
class Library {
 public:
  explicit Library(const std::string& name, const char* otherwise = nullptr)
      : library_(name.c_str(), otherwise, /*leak_handle=*/true) {}

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
  int (*ptx_size)(Program, size_t*);
  int (*ptx)(Program, char*);
  int (*destroy)(Program*);
  int (*version)(int* major, int* minor);
  int (*num_architectures)(int*);
  int (*architectures)(int*);
  const char* (*error_text)(int);

  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }
  void check(int result, const char* what, const char* call) const {
    if (result != 0) {
      raise(
          {.call = call},
          std::string(what) + " failed: " + error_text(result) + ".");
    }
  }

 private:
  Nvrtc() {
    const long cuda = at::detail::getCUDAHooks().versionCUDART();
    // LibTorch's zip has NVRTC under a name that only this library of
    // LibTorch's knows, which needs it: its functions are found there, too.
    Library library(
        "libnvrtc.so." + std::to_string(cuda / 1000), "libcaffe2_nvrtc.so");
    library.find("nvrtcCreateProgram", create);
    library.find("nvrtcCompileProgram", compile);
    library.find("nvrtcGetProgramLogSize", log_size);
    library.find("nvrtcGetProgramLog", log);
    library.find("nvrtcGetCUBINSize", cubin_size);
    library.find("nvrtcGetCUBIN", cubin);
    library.find("nvrtcGetPTXSize", ptx_size);
    library.find("nvrtcGetPTX", ptx);
    library.find("nvrtcDestroyProgram", destroy);
    library.find("nvrtcVersion", version);
    library.find("nvrtcGetNumSupportedArchs", num_architectures);
    library.find("nvrtcGetSupportedArchs", architectures);
    library.find("nvrtcGetErrorString", error_text);
    open_builtins();
  }

  /// NVRTC opens this library by its name alone. In wheels and in LibTorch's
  /// zip it lies beside NVRTC, where nobody looks, unless it has been opened
  /// already. The zip's file has no version in its name.
  void open_builtins() const {
    int major = 0;
    int minor = 0;
    Dl_info nvrtc{};
    if (version(&major, &minor) != 0 ||
        dladdr(reinterpret_cast<void*>(compile), &nvrtc) == 0) {
      return;
    }
    const std::string versioned = "libnvrtc-builtins.so." +
        std::to_string(major) + "." + std::to_string(minor);
    const std::filesystem::path beside(nvrtc.dli_fname);
    for (const std::string& name :
         {versioned, std::string("libnvrtc-builtins.so")}) {
      const auto builtins =
          std::filesystem::path(beside).replace_filename(name);
      if (dlopen(builtins.c_str(), RTLD_NOW) != nullptr) {
        return; // for good
      }
    } // NVRTC says if it has none
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
  void check(CUresult result, const char* what, const char* call) const {
    if (result != CUDA_SUCCESS) {
      const char* text = nullptr;
      error_text(result, &text);
      raise(
          {.call = call},
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

/// 90 for sm_90.
int architecture_of(c10::Device device, const char* call) {
  const Driver& driver = Driver::get();
  CUdevice number = 0;
  driver.check(driver.device(&number, device.index()), "cuDeviceGet", call);
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    driver.check(
        driver.attribute(&value, which, number), "cuDeviceGetAttribute", call);
    return value;
  };
  return 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

/// Loading a module is no work of a stream, so it is allowed while a step is
/// being captured.
class OutsideOfCapture {
 public:
  explicit OutsideOfCapture(const char* call) {
    driver_.check(
        driver_.exchange_capture_mode(&mode_),
        "cuThreadExchangeStreamCaptureMode",
        call);
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

} // namespace

std::vector<int> nvrtc_architectures() {
  constexpr const char* kCall = "nvrtc_architectures";
  const Nvrtc& nvrtc = Nvrtc::get();
  int count = 0;
  nvrtc.check(
      nvrtc.num_architectures(&count), "nvrtcGetNumSupportedArchs", kCall);
  std::vector<int> result(static_cast<size_t>(count));
  nvrtc.check(
      nvrtc.architectures(result.data()), "nvrtcGetSupportedArchs", kCall);
  return result;
}

std::string compile_kernel(
    const KernelSource& source,
    const KernelTarget& target) {
  const Nvrtc& nvrtc = Nvrtc::get();
  const auto check = [&](int result, const char* what) {
    nvrtc.check(result, what, source.call);
  };
  const std::string architecture = "--gpu-architecture=" + target.text();
  const std::array<const char*, 2> options{architecture.c_str(), "--std=c++17"};
  const std::string file = std::string(source.function) + ".cu";
  Nvrtc::Program program = nullptr;
  check(
      nvrtc.create(
          &program, source.text.c_str(), file.c_str(), 0, nullptr, nullptr),
      "nvrtcCreateProgram");
  const std::unique_ptr<Nvrtc::Program, decltype(nvrtc.destroy)> destroyed(
      &program, nvrtc.destroy);
  if (nvrtc.compile(
          program, static_cast<int>(options.size()), options.data()) != 0) {
    size_t size = 0;
    check(nvrtc.log_size(program, &size), "nvrtcGetProgramLogSize");
    std::string log(size, '\0');
    check(nvrtc.log(program, log.data()), "nvrtcGetProgramLog");
    raise(
        {.call = source.call},
        "NVRTC refuses the kernel for " + target.text() + ": " + log);
  }
  size_t size = 0;
  check(
      target.is_ptx ? nvrtc.ptx_size(program, &size)
                    : nvrtc.cubin_size(program, &size),
      target.is_ptx ? "nvrtcGetPTXSize" : "nvrtcGetCUBINSize");
  std::string code(size, '\0');
  check(
      target.is_ptx ? nvrtc.ptx(program, code.data())
                    : nvrtc.cubin(program, code.data()),
      target.is_ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN");
  return code;
}

CudaKernel::CudaKernel(c10::Device device, const KernelSource& source)
    : call_(source.call) {
  const c10::DeviceGuard on_device(device);
  // The guard alone gives no context to a thread that is on the device.
  C10_CUDA_CHECK(c10::cuda::SetDevice(device.index(), /*force=*/true));
  const OutsideOfCapture outside(call_);
  const Driver& driver = Driver::get();
  const std::string code = compile_kernel(
      source,
      kernel_target(architecture_of(device, call_), nvrtc_architectures()));
  CUmodule module = nullptr; // for good
  driver.check(driver.load(&module, code.c_str()), "cuModuleLoadData", call_);
  driver.check(
      driver.function(&function_, module, source.function),
      "cuModuleGetFunction",
      call_);
}

void CudaKernel::launch(
    unsigned blocks,
    unsigned threads,
    std::span<void*> arguments) const {
  const Driver& driver = Driver::get();
  driver.check(
      driver.launch(
          function_,
          blocks,
          1,
          1,
          threads,
          1,
          1,
          /*sharedMemBytes=*/0,
          c10::cuda::getCurrentCUDAStream().stream(),
          arguments.data(),
          nullptr),
      "cuLaunchKernel",
      call_);
}

} // namespace tessera::libtorch
