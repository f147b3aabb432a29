// What would make a run fit that does not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/fit.h"
#include "plan/request.h"

namespace tessera::plan {

/// Other flags for the same model, and what the run takes with them.
struct Suggestion {
  std::string flags; // "--recompute --param-dtype bf16"
  int64_t peak_bytes = 0; // of a rank's device
  bool fits = false;
};

/// Each change of one flag that lowers the peak; if none of them is enough,
/// also the changes that keep the number of ranks, one added to the other
/// until they are enough. `subject` is the request's; `smallest_world` is the
/// number of ranks that fit the request as it is, if there is one.
std::vector<Suggestion> suggestions_for(
    const Request& request,
    const Subject& subject,
    Limit limit,
    std::optional<int64_t> smallest_world);

} // namespace tessera::plan
