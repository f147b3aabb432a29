// What of a checkpoint goes where in the target of a load.
#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

/// A part of a stored box, and the part of the target it goes to.
struct PlannedRead {
  const StoredTensor* tensor;
  const StoredBox* box;
  Place place;
  std::vector<int64_t> begin; // in the tensor
  at::Tensor to;
};

struct MatchedTarget {
  struct Replacement {
    StateValue* at;
    StateValue value;
  };

  std::vector<PlannedRead> reads; // by place
  std::vector<Replacement> replacements; // of values that are not tensors
  LoadReport report;
};

/// Whether a target may leave out a part of the checkpoint as a whole. A
/// dictionary may: the caller chose its parts. An object that has all of a
/// run's state may not: what it leaves out would begin anew.
enum class LeftOutParts { Allowed, Refused };

/// Compares the target with the checkpoint. Throws c10::ValueError that lists
/// everything that does not fit. The result points into both.
MatchedTarget match_target(
    const Source& source,
    StateDict& target,
    const LoadOptions& options,
    LeftOutParts left_out);

} // namespace tessera::checkpoint
