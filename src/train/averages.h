// The averages of what this rank has of a model.
#pragma once

#include <tessera/train/averaged_model.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

/// A tensor of the model, and its average.
struct Average {
  std::string name;
  at::Tensor current; // the leaf of an optimizer, or a buffer
  at::Tensor average; // contiguous
};

/// Averages of the leaves and buffers that a model had when they were made.
class Averages {
 public:
  /// `model` must outlive this object. Throws c10::ValueError for tensors on
  /// the meta device.
  Averages(torch::nn::Module& model, AveragedModelOptions options);

  const std::vector<Average>& params() const {
    return params_;
  }
  const std::vector<Average>& buffers() const {
    return buffers_;
  }

  /// Takes up the current values, after `before` updates.
  void update(int64_t before);
  /// Exchanges current values and averages, all of them or none.
  void exchange();
  /// Throws c10::Error if the model has other tensors now: sharding makes new
  /// leaves.
  void check_same_tensors() const;

 private:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  Average begin(const std::string& name, const at::Tensor& current) const;
  Named model_buffers() const;
  void take_average(const std::vector<const Average*>& items, int64_t before);

  torch::nn::Module& model_;
  AveragedModelOptions options_;
  std::vector<Average> params_;
  std::vector<Average> buffers_;
};

} // namespace tessera::train
