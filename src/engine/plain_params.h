// Parameters that are not sharded, and who averages their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::engine {

/// What optimizers have done to averaged parameters.
struct StepsMade {
  int64_t since_restart = 0;
  std::vector<bool> was_stepped; // ever, by parameter
  bool is_counting = true; // steps from here on

  /// Tells apart which parameters were ever stepped.
  uint64_t digest() const;
};

/// Declares, as long as it lives, that somebody averages the gradients of these
/// parameters over the ranks, and counts the steps of optimizers that have any
/// of them, see note_step().
class AveragedParams {
 public:
  explicit AveragedParams(std::vector<at::Tensor> params);
  ~AveragedParams();
  AveragedParams(const AveragedParams&) = delete;
  AveragedParams& operator=(const AveragedParams&) = delete;

  StepsMade steps() const;
  void set_steps(const StepsMade& steps);
  /// The count begins again at 0.
  void restart_count();
  void set_counting(bool on);

 private:
  friend void note_step(const std::vector<at::Tensor>& params);

  const std::vector<at::Tensor> params_;
  StepsMade steps_; // guarded by the mutex of all AveragedParams
};

bool is_averaged(const at::Tensor& param);
bool is_any_averaged();

/// An optimizer of these parameters, whether they have gradients or not, makes
/// a step: counted once by each AveragedParams that has any of them.
void note_step(const std::vector<at::Tensor>& params);

/// As long as it lives, steps that this thread makes are not noted: they are
/// parts of one that was noted as a whole, or ranks make different numbers of
/// them.
class UnnotedSteps {
 public:
  UnnotedSteps();
  ~UnnotedSteps();
  UnnotedSteps(const UnnotedSteps&) = delete;
  UnnotedSteps& operator=(const UnnotedSteps&) = delete;
};

/// The user excluded the parameter from sharding by name, and is responsible
/// for its gradients.
void set_ignored(const at::Tensor& param);
bool is_ignored(const at::Tensor& param);

} // namespace tessera::engine
