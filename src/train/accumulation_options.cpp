#include "train/accumulation_options.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <string>

namespace tessera::train {
namespace {

constexpr const char* kAccumulationOptions = "GradientAccumulation";

} // namespace

void check_accumulation(
    const GradientAccumulationOptions& options,
    const OptimizerRefs& optimizers) {
  const auto refuse = [](const std::string& what) {
    raise<c10::ValueError>({.call = kAccumulationOptions}, what);
  };
  if (options.steps() < 1) {
    refuse(fmt::format("steps is {}; expected 1 or more.", options.steps()));
  }
  if (options.max_norm() && !(*options.max_norm() > 0)) {
    refuse(fmt::format(
        "max_norm is {}; expected a positive number.", *options.max_norm()));
  }
  if (!(options.typical_samples() > 0 &&
        std::isfinite(options.typical_samples()))) {
    refuse(fmt::format(
        "typical_samples is {}; expected a positive number.",
        options.typical_samples()));
  }
  if (options.error_if_nonfinite() &&
      (!options.max_norm() || options.scaler() != nullptr)) {
    refuse(
        "error_if_nonfinite needs max_norm, and no scaler, which leaves out such steps by itself.");
  }
  if (optimizers.empty()) {
    refuse("there is no optimizer to step. Pass {optimizer}.");
  }
  for (const auto& optimizer : optimizers) {
    const auto* zero =
        dynamic_cast<const ZeroRedundancyOptimizer*>(&optimizer.get());
    if (zero != nullptr && zero->steps_in_backward()) {
      refuse(
          "the ZeroRedundancyOptimizer was made with overlap_with_ddp, so backward steps before all gradients are there. Make it without overlap_with_ddp.");
    }
  }
}

void agree_on_accumulation(
    const GradientAccumulationOptions& options,
    const std::vector<Group>& groups) {
  const auto max_norm = options.max_norm();
  for (const Group& group : groups) {
    agree(
        group,
        kAccumulationOptions,
        {fmt::format("steps {}", options.steps()),
         fmt::format(
             "max_norm {}", max_norm ? std::to_string(*max_norm) : "not set"),
         fmt::format("norm_type {}", options.norm_type()),
         fmt::format("error_if_nonfinite {}", options.error_if_nonfinite()),
         fmt::format("typical_samples {}", options.typical_samples()),
         fmt::format("scaler {}", options.scaler() != nullptr),
         fmt::format("sync_each_batch {}", options.sync_each_batch())});
  }
}

} // namespace tessera::train
