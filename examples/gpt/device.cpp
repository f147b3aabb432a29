#include "device.h"

#include <tessera/tessera.h>

#include "settings.h"

namespace gpt {

torch::Device device_of(const std::string& name) {
  const bool has_cuda = torch::cuda::is_available();
  if (name == "cpu" || (name == "auto" && !has_cuda)) {
    return torch::kCPU;
  }
  if (!has_cuda) {
    throw UsageError("--device " + name + ", but LibTorch finds no GPU.");
  }
  const auto count = static_cast<int>(torch::cuda::device_count());
  return {
      torch::kCUDA,
      static_cast<torch::DeviceIndex>(tessera::local_rank() % count)};
}

} // namespace gpt
