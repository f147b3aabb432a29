// The schedule that looks at a metric. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/optim/lr_scheduler.h>
#include <tessera/state/stateful.h>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace tessera::optim {

/// Which metrics are better.
enum class PlateauMode {
  Min, ///< lower metrics, such as a loss
  Max, ///< higher metrics, such as an accuracy
};
/// How the threshold is compared with the best metric.
enum class ThresholdMode {
  Rel, ///< as a share of the best metric
  Abs, ///< as a difference from the best metric
};
/// How all ranks decide by one number.
enum class RankMetrics {
  Mean, ///< the mean over the ranks decides
  Same, ///< metrics that differ are an error on every rank
};

/// Options as in Python's ReduceLROnPlateau, and how the ranks' metrics are
/// combined.
struct TESSERA_API ReduceLROnPlateauOptions {
  /// Which metrics are better.
  TORCH_ARG(PlateauMode, mode) = PlateauMode::Min;
  /// What the learning rate is multiplied by; below 1.
  TORCH_ARG(double, factor) = 0.1;
  /// How many steps in a row may bring no better metric before the learning
  /// rate is lowered.
  TORCH_ARG(int64_t, patience) = 10;
  /// How much a metric must differ from the best one to count as better.
  TORCH_ARG(double, threshold) = 1e-4;
  /// A share of the best metric, or a difference.
  TORCH_ARG(ThresholdMode, threshold_mode) = ThresholdMode::Rel;
  /// How many steps after a change are not counted, even without a better
  /// metric.
  TORCH_ARG(int64_t, cooldown) = 0;
  /// The lowest learning rate.
  TORCH_ARG(PerGroup, min_lr) = 0.0;
  /// A change of a learning rate that is smaller than this is not made.
  TORCH_ARG(double, eps) = 1e-8;
  /// See RankMetrics.
  TORCH_ARG(RankMetrics, rank_metrics) = RankMetrics::Mean;
  /// The ranks that train together; default: the world, or this process alone
  /// before init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Lowers the learning rate when a metric has stopped improving. Every rank
/// passes its own metric, and all ranks decide by the same number: the mean,
/// added in the order of the ranks, so that its bits are equal.
class TESSERA_API ReduceLROnPlateau : public Stateful {
 public:
  /// Throws c10::ValueError unless factor is below 1, and for lists of another
  /// length than the param groups. Not collective.
  explicit ReduceLROnPlateau(
      torch::optim::Optimizer& optimizer,
      ReduceLROnPlateauOptions options = {});
  ~ReduceLROnPlateau() override;
  ReduceLROnPlateau(const ReduceLROnPlateau&) = delete;
  ReduceLROnPlateau& operator=(const ReduceLROnPlateau&) = delete;

  /// Reports this rank's metric. Exchanges 8 bytes per rank. Throws
  /// DisagreementError on every rank, with the metrics, if they must be the
  /// same and are not; nothing has changed then. Collective over the group.
  void step(double metric);

  /// The learning rates after the last step, one per param group.
  const std::vector<double>& get_last_lr() const {
    return last_lr_;
  }
  /// The best metric so far; infinite before the first.
  double best() const {
    return best_;
  }
  /// How many metrics were reported, and how many in a row, up to the last,
  /// were not better.
  int64_t last_epoch() const {
    return last_epoch_;
  }
  int64_t num_bad_epochs() const {
    return num_bad_epochs_;
  }

  /// The dictionary of Python's class, key for key, and loading it as
  /// EpochSchedule does. Not collective.
  StateDict state_dict() override;
  void load_state_dict(const StateDict& state) override;

 private:
  double agreed(double metric) const;
  bool is_better(double metric) const;
  /// Throws before it changes anything.
  void reduce_lr();
  std::vector<OptionField> fields();
  void read(const StateDict& state);

  std::shared_ptr<GroupValues> groups_;
  ReduceLROnPlateauOptions options_;
  std::vector<double> min_lrs_;
  std::vector<double> last_lr_;
  double best_ = std::numeric_limits<double>::infinity();
  int64_t last_epoch_ = 0;
  int64_t cooldown_counter_ = 0;
  int64_t num_bad_epochs_ = 0;
};

} // namespace tessera::optim
