// The model and its optimizers, as steps see them.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/parameters.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/reducer.h"
#include "engine/unit.h"

namespace tessera::train {

/// What errors call the caller.
inline constexpr const char* kCapturedStep = "CapturedStep";

/// A model and its optimizers, as they are when this object is made.
struct StepParts {
  StepParts(torch::nn::Module& module, OptimizerRefs all);

  torch::nn::Module& model;
  const OptimizerRefs optimizers;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const std::vector<std::shared_ptr<engine::Unit>> units; // of the model
  const NamedTensors params; // as the modules have them
  const NamedTensors buffers;
  /// Parameters as optimizers get them: of the model, then those that the
  /// optimizers step beside them.
  const std::vector<at::Tensor> leaves;

  at::Device device() const;
  /// Of DistributedDataParallel, whose gradients these are, now.
  std::vector<ddp::Reducer*> reducers() const;
  /// The groups of ranks that train together, each once; those of one rank are
  /// left out.
  std::vector<Group> groups() const;
  /// A parameter or buffer that the model has replaced by another tensor:
  /// "buffer "hidden""; empty if there is none.
  std::string replaced() const;
  /// For the caller of a step: detached, and in memory of its own if a
  /// parameter or buffer has it now.
  at::Tensor result_of(const at::Tensor& output) const;
};

/// The optimizer whose groups and state a step of `optimizer` uses: itself, or
/// the local one of a ZeroRedundancyOptimizer.
torch::optim::Optimizer& stepping_part(torch::optim::Optimizer& optimizer);

/// A digest of where parameters, buffers and the state of the optimizers lie. A
/// recorded step reads and writes there, whatever the program has put in their
/// place since.
uint64_t places_of(const StepParts& parts);

} // namespace tessera::train
