#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>

#include "settings.h"

namespace gpt {

/// The model FLOPS utilization of a run, MFU: the share of the peak of all
/// devices that the model's own arithmetic takes. See flops.h.
class Utilization {
 public:
  /// `flops_per_token` is the model's, if it is known. Ranks that share a GPU
  /// share its peak. Collective.
  Utilization(
      const tessera::Group& world,
      const Settings& settings,
      std::optional<double> flops_per_token,
      torch::Device device);

  /// From 0 to 1; nothing if the peak of a device, or what a token takes, is
  /// not known.
  std::optional<double> of(double tokens_per_second) const;
  /// What it is the share of, or why there is none; empty if the peak is not
  /// known.
  std::string described() const;

 private:
  const std::optional<double> flops_per_token_;
  double peak_flops_ = 0; // per second; 0: not known
};

} // namespace gpt
