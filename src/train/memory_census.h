// The memory that a model, its gradients and its optimizers hold.
#pragma once

#include <tessera/train/monitor.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ddp/reducer.h"
#include "engine/schedule.h"
#include "engine/unit.h"

namespace tessera::train {

/// Bytes by kind on the device that the model computes on, from what its units,
/// leaves and optimizers have. (Activations leave no such trace.)
class MemoryCensus {
 public:
  MemoryCensus(torch::nn::Module& model, OptimizerRefs optimizers);

  at::Device device() const {
    return device_;
  }
  const std::vector<std::shared_ptr<engine::Unit>>& units() const {
    return units_;
  }
  /// Parameters that do not belong to a unit.
  const std::vector<at::Tensor>& plain_params() const {
    return plain_params_;
  }

  /// Records what does not change within a step: parameters, buffers, state of
  /// optimizers. Returns how many bytes of now() are counted elsewhere
  /// according to `is_counted`. Call it between steps.
  using IsCounted = bool (*)(const c10::DataPtr&);
  int64_t take_stock(IsCounted is_counted);

  /// The bytes now: parameters and state as of take_stock(), gradients and full
  /// parameters as they are. "other" means the module's buffers. Fast, and
  /// allocates no tensor, so it may be called inside an allocation.
  MemoryByKind now() const;

 private:
  /// Bytes, and how many of them are counted elsewhere.
  struct Sum {
    int64_t bytes = 0;
    int64_t counted = 0;
  };
  class Stock;

  Sum state_of_optimizers(IsCounted is_counted);
  bool is_bucket(const c10::StorageImpl* storage) const;
  template <class See>
  void for_each_gradient(const See& see) const;

  torch::nn::Module& model_;
  const OptimizerRefs optimizers_;
  const std::vector<std::shared_ptr<engine::Unit>> units_;
  std::vector<engine::Schedule*> schedules_; // of the units, each once
  std::vector<at::Tensor> plain_params_;
  std::vector<at::Tensor> leaves_; // of units, and plain parameters
  at::Device device_ = at::kCPU;

  // Values as of take_stock().
  MemoryByKind stock_;
  std::vector<const ddp::Reducer*> reducers_;
  Sum state_; // of optimizers
  size_t num_states_ = 0; // of parameters, when that was summed
  /// For each storage, whether it was counted when that was last visible.
  std::unordered_map<const c10::StorageImpl*, bool> was_counted_;
};

} // namespace tessera::train
