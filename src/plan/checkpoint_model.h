// A model by the names, shapes and dtypes of its checkpoint.
#pragma once

#include <cstddef>
#include <string>

#include "checkpoint/disk/source.h"
#include "plan/model.h"

namespace tessera::plan {

struct CheckpointOptions {
  /// Only names that begin with this, at a dot. Empty: those below "model" in a
  /// checkpoint of a whole run, where other names begin with "optim"; else all.
  std::string select;
  /// A regular expression; parameters in whose names it finds the same text are
  /// a unit, the others the root. Empty: modules of a numbered list,
  /// "blocks.7", the outermost.
  std::string unit;
};

struct CheckpointModel {
  Model model;
  size_t num_left_out = 0; // tensors that were not selected
  size_t num_buffers = 0; // tensors of integers
};

/// Reads no data. Throws PlanError, also if nothing is left.
CheckpointModel model_of(
    const checkpoint::Source& source,
    const CheckpointOptions& options);

} // namespace tessera::plan
