#include "train/scaler_options.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>

namespace tessera::train {

void check_scaler_options(const GradScalerOptions& options, const char* call) {
  const auto refuse = [&](const char* name, auto value, const char* wanted) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format("{} is {}; expected {}.", name, value, wanted));
  };
  const double scale = options.init_scale();
  if (!(std::isfinite(scale) && scale > 0)) {
    refuse("the scale", scale, "a positive number");
  }
  if (!(options.growth_factor() > 1)) {
    refuse("growth_factor", options.growth_factor(), "more than 1");
  }
  if (!(options.backoff_factor() > 0 && options.backoff_factor() < 1)) {
    refuse(
        "backoff_factor", options.backoff_factor(), "a number between 0 and 1");
  }
  if (options.growth_interval() < 1) {
    refuse("growth_interval", options.growth_interval(), "1 or more");
  }
}

} // namespace tessera::train
