// Walks through a program once, with shapes in place of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "exported/format/program.h"
#include "plan/activations/graph_sizes.h"
#include "plan/activations/operator_call.h"
#include "plan/activations/tape.h"
#include "plan/setup.h"

namespace tessera::plan {

struct WalkOptions {
  Device device = Device::Cpu;
  /// Where parameters are in the model, by path.
  std::map<std::string, ParamPlace> params;
  /// Paths of modules whose calls are recomputed.
  std::set<std::string> recomputed;
  /// The dtype in which the loss is computed.
  format::DType loss_dtype = format::DType::Float32;
};

/// What a step of a program does.
struct Walk {
  StepEvents forward;
  StepEvents backward;
  /// Operators without a rule: their results are taken for saved.
  std::set<std::string> unknown;
  int64_t constant_bytes = 0; // of what is computed once
  /// Of what the loss is made: the name of a result, which is the loss itself
  /// if it is one number. Empty if no result has a gradient.
  std::string loss;
  bool is_loss = false;
};

/// See [Note: planned activations]. Throws exported::UnknownSize for sizes that
/// depend on data, PlanError for a module that cannot be recomputed.
Walk walk_through(
    const exported::Program& program,
    const GraphSizes& sizes,
    const WalkOptions& options);

} // namespace tessera::plan
