// The schedule of one cycle. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/optim/lr_scheduler.h>

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// The curve between two learning rates.
enum class AnnealStrategy {
  Cos, ///< half a cosine
  Linear, ///< a straight line
};

/// Options as in Python's OneCycleLR.
struct TESSERA_API OneCycleLROptions {
  /// With Python's defaults.
  OneCycleLROptions(PerGroup max_lr) : max_lr_(std::move(max_lr)) {}
  OneCycleLROptions(double max_lr) : max_lr_(max_lr) {}
  /// The highest learning rate.
  TORCH_ARG(PerGroup, max_lr){0.0};
  /// Steps of the cycle, or epochs and the steps of each.
  TORCH_ARG(std::optional<int64_t>, total_steps) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, epochs) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, steps_per_epoch) = std::nullopt;
  /// The share of the steps in which the learning rate rises.
  TORCH_ARG(double, pct_start) = 0.3;
  /// The curve.
  TORCH_ARG(AnnealStrategy, anneal_strategy) = AnnealStrategy::Cos;
  /// Momentum (the first of Adam's betas) falls as the learning rate rises.
  TORCH_ARG(bool, cycle_momentum) = true;
  /// The momentum at the top of the cycle, and at its ends.
  TORCH_ARG(PerGroup, base_momentum) = 0.85;
  TORCH_ARG(PerGroup, max_momentum) = 0.95;
  /// The cycle begins at max_lr / div_factor, and ends at that learning rate
  /// divided by final_div_factor.
  TORCH_ARG(double, div_factor) = 25;
  TORCH_ARG(double, final_div_factor) = 1e4;
  /// Falls as long as it rose, then falls further.
  TORCH_ARG(bool, three_phase) = false;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Rises from a low learning rate to max_lr and falls far below where it began,
/// once. The optimizer's own learning rate is replaced.
class TESSERA_API OneCycleLR : public EpochSchedule {
 public:
  /// Throws c10::ValueError for options out of range, lists of another length
  /// than the param groups, and with cycle_momentum for an optimizer that has
  /// neither momentum nor betas.
  OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options);

 protected:
  /// Throws c10::ValueError beyond the last step.
  std::vector<double> get_lr() const override;
  std::vector<OptionField> fields() override;
  void write_more(StateDict& state) const override;
  void read_more(const StateDict& state) override;
  void set_lrs(const std::vector<double>& lrs) override;

 private:
  /// A stretch of the cycle, by the names that its ends have in a param group.
  struct Phase {
    double end_step = 0;
    std::string start_lr;
    std::string end_lr;
    std::string start_momentum;
    std::string end_momentum;
  };
  /// Where an epoch lies.
  struct Place {
    const Phase* phase = nullptr;
    double share = 0; // of the phase
  };

  void prepare_groups(const OneCycleLROptions& options);
  Place place() const;
  double annealed(
      size_t group,
      const std::string& start,
      const std::string& end,
      double share) const;

  int64_t total_steps_ = 0;
  std::vector<Phase> phases_;
  AnnealStrategy anneal_strategy_;
  bool cycle_momentum_;
  bool use_beta1_ = false; // momentum is the first of the betas
};

} // namespace tessera::optim
