// One small model, trained in each of the ways that there are.
#pragma once

#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/train/gradient_accumulation.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/training.h"

namespace tessera::testing {

enum class FrontEnd {
  Flat, // the FSDP handle
  Dim0, // fully_shard by rows: some ranks have nothing of a parameter
  Ddp,
  Zero, // Ddp with a ZeroRedundancyOptimizer
};

inline std::string name_of(FrontEnd kind) {
  switch (kind) {
    case FrontEnd::Flat:
      return "Flat";
    case FrontEnd::Dim0:
      return "Dim0";
    case FrontEnd::Ddp:
      return "Ddp";
    case FrontEnd::Zero:
      return "Zero";
  }
  return "?";
}

inline std::ostream& operator<<(std::ostream& out, FrontEnd kind) {
  return out << name_of(kind);
}

/// A model in double on all ranks of the world, with an optimizer of class O.
template <class O = optim::SGD>
struct Trained {
  explicit Trained(FrontEnd kind, double lr = 0.1) : model(make_stack()) {
    if (kind == FrontEnd::Flat) {
      fsdp = std::make_unique<FSDP<StackImpl>>(model.ptr(), by_block());
    } else if (kind == FrontEnd::Dim0) {
      shard_blocks(model, FullyShardOptions().layout(ShardLayout::Dim0));
    } else {
      ddp = std::make_unique<DistributedDataParallel<StackImpl>>(model.ptr());
    }
    if (kind == FrontEnd::Zero) {
      optimizer = std::make_unique<ZeroRedundancyOptimizer>(
          parameters(model), optimizer_class<O>(lr));
    } else {
      optimizer = std::make_unique<O>(parameters(model), lr);
    }
  }

  std::unique_ptr<GradientAccumulation> accumulate(
      const GradientAccumulationOptions& options) {
    const OptimizerRefs optimizers{*optimizer};
    return ddp
        ? std::make_unique<GradientAccumulation>(*ddp, optimizers, options)
        : std::make_unique<GradientAccumulation>(model, optimizers, options);
  }

  /// This rank's parameters and state, as they are now.
  std::vector<at::Tensor> snapshot() {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& param : parameters(model)) {
      copies.push_back(param.detach().clone());
    }
    return copies;
  }

  /// Makes one element of a gradient on this rank infinite.
  void spoil_gradient() {
    for (const at::Tensor& param : parameters(model)) {
      if (param.grad().defined() && param.grad().numel() > 0) {
        param.grad().view({-1})[0] = std::numeric_limits<double>::infinity();
        return;
      }
    }
    FAIL() << "this rank has no gradient";
  }

  Stack model{nullptr};
  std::unique_ptr<FSDP<StackImpl>> fsdp;
  std::unique_ptr<DistributedDataParallel<StackImpl>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

inline bool all_equal(
    const std::vector<at::Tensor>& a,
    const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) {
      return false;
    }
  }
  return a.size() == b.size();
}

} // namespace tessera::testing
