#include "utilization.h"

#include <cstdio>

#include "flops.h"

namespace gpt {

Utilization::Utilization(
    const tessera::Group& world,
    const Settings& settings,
    std::optional<double> flops_per_token,
    torch::Device device)
    : flops_per_token_(flops_per_token) {
  const auto peak = peak_tflops(settings, device);
  const bool has_own_device = !device.is_cuda() ||
      tessera::local_rank() < static_cast<int>(torch::cuda::device_count());
  auto sums = torch::zeros({2}, torch::kDouble); // the peaks, those not known
  sums[0] = has_own_device ? peak.value_or(0) * 1e12 : 0.0;
  sums[1] = peak ? 0.0 : 1.0;
  world.all_reduce(sums, tessera::ReduceOp::Sum, "peak of the devices");
  peak_flops_ = sums[1].item<double>() > 0 ? 0 : sums[0].item<double>();
}

std::optional<double> Utilization::of(double tokens_per_second) const {
  return peak_flops_ > 0 && flops_per_token_
      ? std::optional(tokens_per_second * *flops_per_token_ / peak_flops_)
      : std::nullopt;
}

std::string Utilization::described() const {
  if (peak_flops_ <= 0) {
    return "";
  }
  if (!flops_per_token_) {
    return "mfu is left out: how much arithmetic a token takes is not known of "
           "an exported model";
  }
  char text[128];
  std::snprintf(
      text,
      sizeof(text),
      "mfu is the share of %.4g TFLOPS, the peak of all devices; a token takes "
      "%.4g GFLOP",
      peak_flops_ / 1e12,
      *flops_per_token_ / 1e9);
  return text;
}

} // namespace gpt
