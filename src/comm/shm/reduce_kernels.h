// Elementwise reductions for every dtype that shared memory can reduce.
#pragma once

#include <tessera/comm/reduce_op.h>

#include <c10/core/ScalarType.h>

#include <optional>

#include "comm/shm/collectives.h"

namespace tessera::comm::shm {

/// The reduction for `dtype` and `op`, or nothing if it is not defined (an
/// average of integers, any reduction of a quantized type). float16 and
/// bfloat16 are summed in float32 and rounded once; bool sums as "or"; averages
/// divide the sum by the number of ranks.
std::optional<Reduction> find_reduction(c10::ScalarType dtype, ReduceOp op);

} // namespace tessera::comm::shm
