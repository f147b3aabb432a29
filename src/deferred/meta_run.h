// Runs operators on the meta device, where tensors have shapes and no values.
#pragma once

#include <memory>
#include <vector>

#include "deferred/operator_call.h"
#include "deferred/tape.h"

namespace tessera::deferred {

/// A tensor on the meta device and the one with memory that it stands for.
struct Twins {
  at::Tensor meta;
  at::Tensor real;
};

struct MetaResults {
  torch::jit::Stack values;
  std::vector<Twins> twins; // stood for the arguments with memory
};

/// Runs the call on the meta device. An operator that has no kernel there runs
/// on memory, for the shapes of its results.
MetaResults run_on_meta(OperatorCall& call, at::Device device);

/// Makes new results deferred, and puts tensors with memory where there are
/// views of their twins. Returns the new ones.
std::vector<Record::Slot> defer_results(
    const OperatorCall& call,
    const std::shared_ptr<Tape>& tape,
    at::Device device,
    MetaResults& results);

} // namespace tessera::deferred
