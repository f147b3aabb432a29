// What a recorded step takes for granted.
#pragma once

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

/// A model and its optimizers, as steps see them.
struct StepParts {
  StepParts(torch::nn::Module& module, OptimizerRefs all);

  torch::nn::Module& model;
  const OptimizerRefs optimizers;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const std::vector<std::shared_ptr<engine::Unit>> units;
  const std::vector<at::Tensor> params; // as the modules have them
  const std::vector<at::Tensor> leaves; // as optimizers get them
  const std::vector<at::Tensor> buffers;

  /// Of DistributedDataParallel, whose gradients these are, now.
  std::vector<ddp::Reducer*> reducers() const;
  /// The groups of ranks that train together, each once; those of one rank are
  /// left out.
  std::vector<Group> groups() const;
};

/// The optimizer whose groups and state a step of `optimizer` uses: itself, or
/// the local one of a ZeroRedundancyOptimizer.
torch::optim::Optimizer& stepping_part(torch::optim::Optimizer& optimizer);

/// Two steps are of one kind if they differ in values alone: in those of
/// inputs, parameters, state and learning rates. The same bytes mean the same
/// kind: shapes, dtypes and strides of the inputs, what is trained and has a
/// gradient, what units do with gradients, modes of the modules, autocast, and
/// the options of the groups.
std::string kind_of_step(
    const StepParts& parts,
    const std::vector<at::Tensor>& inputs);

/// A digest of where parameters, buffers and the state of the optimizers lie. A
/// recorded step reads and writes there, whatever the program has put in their
/// place since.
uint64_t places_of(const StepParts& parts);

} // namespace tessera::train
