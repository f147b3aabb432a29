// The curves of a run as the page's script draws them: `steps` and `values`,
// thinned out where there are too many, and `old`, the parts that were run
// again after a restart. A curve that was thinned out also has `mean`: the
// means of its stretches, and of how many values each is (see [Note: smoothing]
// in page/smoothing.js).
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>

#include "report/run.h"

namespace tessera::report {

/// "loss", "lr", "grad_norm", "tokens_per_second" and "evals", each of at most
/// `limit` points.
nlohmann::json curves_data(const Run& run, size_t limit);

/// The memory of the rank with the most: each of kMemoryKinds.
nlohmann::json memory_data(const Run& run);
/// The same, all kinds together, as a curve.
nlohmann::json memory_curve(const Run& run, size_t limit);

} // namespace tessera::report
