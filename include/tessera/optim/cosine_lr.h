// Schedules that fall along a cosine. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/optim/lr_scheduler.h>

#include <torch/arg.h>

#include <cstdint>
#include <vector>

namespace tessera::optim {

/// Options as in Python's CosineAnnealingLR.
struct TESSERA_API CosineAnnealingLROptions {
  /// With Python's defaults.
  CosineAnnealingLROptions(int64_t T_max) : T_max_(T_max) {}
  /// Epochs from the highest learning rate to the lowest.
  TORCH_ARG(int64_t, T_max){};
  /// The lowest learning rate.
  TORCH_ARG(double, eta_min) = 0;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Falls to eta_min in T_max epochs along half a cosine, and rises again in as
/// many if it is stepped further.
class TESSERA_API CosineAnnealingLR : public EpochSchedule {
 public:
  /// Throws c10::ValueError unless T_max is above 0.
  CosineAnnealingLR(
      torch::optim::Optimizer& optimizer,
      CosineAnnealingLROptions options);

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;
  void read_more(const StateDict& state) override;

 private:
  CosineAnnealingLROptions options_;
};

/// Options as in Python's CosineAnnealingWarmRestarts.
struct TESSERA_API CosineAnnealingWarmRestartsOptions {
  /// With Python's defaults.
  CosineAnnealingWarmRestartsOptions(int64_t T_0) : T_0_(T_0) {}
  /// Epochs until the first restart.
  TORCH_ARG(int64_t, T_0){};
  /// Each round is this many times as long as the one before.
  TORCH_ARG(int64_t, T_mult) = 1;
  /// The lowest learning rate.
  TORCH_ARG(double, eta_min) = 0;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Falls to eta_min along half a cosine, then starts again from the top.
class TESSERA_API CosineAnnealingWarmRestarts : public EpochSchedule {
 public:
  /// Throws c10::ValueError unless T_0 and T_mult are above 0.
  CosineAnnealingWarmRestarts(
      torch::optim::Optimizer& optimizer,
      CosineAnnealingWarmRestartsOptions options);

  void step() override;
  /// Goes to an epoch, which need not be whole: step(epoch + i / batches) after
  /// batch i. Throws c10::ValueError for a negative one.
  void step(double epoch);

 protected:
  std::vector<double> get_lr() const override;
  std::vector<OptionField> fields() override;
  void write_more(StateDict& state) const override;
  void read_more(const StateDict& state) override;

 private:
  /// A place in a round of a length.
  struct Place {
    double T_cur = 0; // epochs since the restart
    int64_t T_i = 0; // epochs of the round
  };
  void go_to(int64_t epoch, Place place);

  CosineAnnealingWarmRestartsOptions options_;
  Place place_;
};

} // namespace tessera::optim
