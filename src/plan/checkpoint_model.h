// A model as the names, shapes and dtypes of its checkpoint describe it.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "checkpoint/disk/source.h"
#include "plan/model.h"

namespace tessera::plan {

struct CheckpointOptions {
  /// Only names that begin with this, at a dot. Empty: those below "model" in a
  /// checkpoint of a whole run, where other names begin with "optim"; else all.
  std::string select;
  /// A regular expression. Parameters in whose names it finds the same text
  /// form a unit; the others form the root. Empty: each module of the outermost
  /// numbered list is a unit, such as "blocks.7".
  std::string unit;
};

struct CheckpointModel {
  Model model;
  size_t num_left_out = 0; // tensors that were not selected
  size_t num_buffers = 0; // tensors of integers, and those that are buffers
  size_t num_tied = 0; // parameters that are another one: counted once
  /// Where parameters are, by their names in the checkpoint; tied ones too.
  std::map<std::string, ParamPlace> places;
};

/// Reads no data. Throws PlanError, also if no parameter is selected.
CheckpointModel model_of(
    const checkpoint::Source& source,
    const CheckpointOptions& options);

} // namespace tessera::plan
