// A rank of DistributedDataParallel, with or without a ZeroRedundancyOptimizer:
// all parameters whole, gradients averaged in buckets.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/rank.h"

namespace tessera::plan {

class ReplicatedRank : public Rank {
 public:
  ReplicatedRank(
      const Model& model,
      const TrainingSetup& setup,
      Account& account);

  void begin_forward() override {}
  void begin_backward(bool reduces) override {
    reduces_ = reduces;
  }
  void touch(size_t) override {} // parameters are always full
  void add_gradient(size_t unit, size_t param) override;
  void finish_unit(size_t) override {}
  void end_backward() override;
  void step() override;

 private:
  struct Param {
    int64_t numel = 0;
    int64_t bytes = 0;
    format::DType dtype = format::DType::Float32;
    bool has_gradient = false;
    bool came = false; // in this backward
    double made_at = 0;
  };

  void add_params(const Model& model);
  void choose_owners();

  const TrainingSetup& setup_;
  Account& account_;
  std::vector<Param> params_; // unit after unit
  std::vector<size_t> first_of_; // by unit: where its parameters begin
  std::vector<size_t> order_; // in which gradients came
  int64_t bytes_ = 0; // of all parameters
  // Parameters of the rank that steps the most bytes.
  int64_t owned_bytes_ = 0;
  int64_t num_owned_ = 0;
  // Parameters that owners send to the other ranks after a step.
  int64_t sent_bytes_ = 0;
  int64_t num_sends_ = 0; // collectives
  bool reduces_ = true;
  bool has_buckets_ = false;
  bool has_state_ = false; // the optimizer
};

} // namespace tessera::plan
