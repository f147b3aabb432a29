// A model and who averages its gradients over the ranks.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/ddp/distributed_data_parallel.h>

#include <torch/nn/module.h>

#include <vector>

namespace tessera::train {

/// A sharded model, one of a DistributedDataParallel, or a plain one, whose
/// gradients nobody averages.
class GradientAverager {
 public:
  /// `ddp` is null unless it averages. Both must outlive this object.
  GradientAverager(torch::nn::Module& model, detail::DDPHandle* ddp);

  torch::nn::Module& module() const {
    return model_;
  }
  /// The ranks whose gradients are averaged, if there are several.
  const std::vector<Group>& groups() const {
    return groups_;
  }
  /// The device of the first parameter.
  at::Device device() const;
  int num_ranks() const {
    return groups_.empty() ? 1 : groups_.front().size();
  }
  /// Throws c10::ValueError if the module is not one of these kinds. Not
  /// collective.
  void check(const char* call) const;

  /// If off, gradients of the next backwards accumulate on each rank.
  void set_syncs(bool on) const;
  /// Averages what has accumulated. Collective.
  void reduce() const;
  /// Multiplies all gradients of this rank.
  void multiply_gradients(double factor) const;
  /// Forgets gradients that wait to be averaged.
  void drop_waiting() const;

 private:
  torch::nn::Module& model_;
  detail::DDPHandle* const ddp_;
  std::vector<Group> groups_; // one, or none
};

} // namespace tessera::train
