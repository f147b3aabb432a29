#include "flops.h"

#include <dlfcn.h>

#include <array>

namespace gpt {
namespace {

struct Peak {
  std::string_view name; // a part of the GPU's name
  double half; // TFLOPS, dense
  double tf32; // 0: the GPU has none
  double fp32;
};

/// From the vendor's data sheets. The first name that fits counts, so special
/// ones come first.
constexpr std::array<Peak, 19> kPeaks{
    {{"B200", 2250, 1125, 75},
     {"GH200", 989.4, 494.7, 66.9},
     {"H200 NVL", 835.5, 417.5, 60},
     {"H200", 989.4, 494.7, 66.9},
     {"H100 NVL", 835.5, 417.5, 60},
     {"H100 PCIe", 756, 378, 51.2},
     {"H100", 989.4, 494.7, 66.9},
     {"H800 PCIe", 756, 378, 51.2},
     {"H800", 989.4, 494.7, 66.9},
     {"H20", 148, 74, 44},
     {"A100", 312, 156, 19.5},
     {"A800", 312, 156, 19.5},
     {"A40", 149.7, 74.8, 37.4},
     {"A30", 165, 82, 10.3},
     {"A10G", 70, 35, 31.5},
     {"L40S", 362, 183, 91.6},
     {"L40", 181, 90.5, 90.5},
     {"L4", 121, 60, 30.3},
     {"A10", 125, 62.5, 31.2}}};

/// Whether `part` is in `name`, not followed by a letter or digit: "L4" is not
/// in "L40".
bool has_word(std::string_view name, std::string_view part) {
  for (size_t at = name.find(part); at != std::string_view::npos;
       at = name.find(part, at + 1)) {
    const size_t end = at + part.size();
    const bool begins = at == 0 || name[at - 1] == ' ' || name[at - 1] == '-';
    const bool ends =
        end == name.size() || name[end] == ' ' || name[end] == '-';
    if (begins && ends) {
      return true;
    }
  }
  return false;
}

Arithmetic arithmetic_of(const Settings& settings) {
  if (settings.precision != Precision::Float32) {
    return Arithmetic::Half;
  }
  return at::globalContext().allowTF32CuBLAS() ? Arithmetic::TensorFloat32
                                               : Arithmetic::Float32;
}

} // namespace

double flops_per_token(const GptConfig& config, int64_t num_parameters) {
  const auto multiplied =
      static_cast<double>(num_parameters - config.length * config.width);
  const auto attention =
      static_cast<double>(config.layers * config.width * config.length);
  return 6 * multiplied + 12 * attention;
}

std::optional<double> peak_tflops_of(
    std::string_view gpu_name,
    Arithmetic arithmetic) {
  if (has_word(gpu_name, "MIG")) {
    return std::nullopt; // a slice of a GPU
  }
  for (const Peak& peak : kPeaks) {
    if (!has_word(gpu_name, peak.name)) {
      continue;
    }
    switch (arithmetic) {
      case Arithmetic::Float32:
        return peak.fp32;
      case Arithmetic::TensorFloat32:
        return peak.tf32;
      case Arithmetic::Half:
        return peak.half;
    }
  }
  return std::nullopt;
}

/// LibTorch's own call needs the headers of CUDA; the driver's needs none.
std::string gpu_name(torch::Device device) {
  void* driver =
      device.is_cuda() ? ::dlopen("libcuda.so.1", RTLD_LAZY) : nullptr;
  if (driver == nullptr) {
    return "";
  }
  using GetDevice = int (*)(int*, int);
  using GetName = int (*)(char*, int, int);
  const auto get_device =
      reinterpret_cast<GetDevice>(::dlsym(driver, "cuDeviceGet"));
  const auto get_name =
      reinterpret_cast<GetName>(::dlsym(driver, "cuDeviceGetName"));
  int handle = 0;
  std::array<char, 256> name{};
  const bool is_known = get_device != nullptr && get_name != nullptr &&
      get_device(&handle, device.index()) == 0 &&
      get_name(name.data(), static_cast<int>(name.size()) - 1, handle) == 0;
  ::dlclose(driver);
  return is_known ? name.data() : "";
}

std::optional<double> peak_tflops(
    const Settings& settings,
    torch::Device device) {
  if (settings.peak_tflops > 0) {
    return settings.peak_tflops;
  }
  return peak_tflops_of(gpu_name(device), arithmetic_of(settings));
}

} // namespace gpt
