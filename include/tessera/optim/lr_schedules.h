// Schedules that are one formula. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/optim/lr_scheduler.h>

#include <torch/arg.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

namespace tessera::optim {

/// Options as in Python's StepLR.
struct TESSERA_API StepLROptions {
  /// With Python's defaults.
  StepLROptions(int64_t step_size) : step_size_(step_size) {}
  /// Epochs between changes.
  TORCH_ARG(int64_t, step_size){};
  /// The factor.
  TORCH_ARG(double, gamma) = 0.1;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Multiplies the learning rate by gamma every step_size epochs.
class TESSERA_API StepLR : public EpochSchedule {
 public:
  /// Throws c10::ValueError unless step_size is above 0.
  StepLR(torch::optim::Optimizer& optimizer, StepLROptions options);

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;
  void read_more(const StateDict& state) override;

 private:
  void check() const;

  StepLROptions options_;
};

/// Options as in Python's MultiStepLR.
struct TESSERA_API MultiStepLROptions {
  /// With Python's defaults.
  MultiStepLROptions(std::vector<int64_t> milestones)
      : milestones_(std::move(milestones)) {}
  MultiStepLROptions(std::initializer_list<int64_t> milestones)
      : milestones_(milestones) {}
  /// Epochs, in any order; one that is given twice counts twice.
  TORCH_ARG(std::vector<int64_t>, milestones){};
  /// The factor.
  TORCH_ARG(double, gamma) = 0.1;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Multiplies the learning rate by gamma at each milestone.
class TESSERA_API MultiStepLR : public EpochSchedule {
 public:
  /// Throws as EpochSchedule::start() does.
  MultiStepLR(torch::optim::Optimizer& optimizer, MultiStepLROptions options);

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;
  void write_more(StateDict& state) const override;
  void read_more(const StateDict& state) override;

 private:
  MultiStepLROptions options_;
  std::map<int64_t, int64_t> milestones_; // how often each is given
};

/// Options as in Python's ConstantLR.
struct TESSERA_API ConstantLROptions {
  /// From 0 to 1.
  TORCH_ARG(double, factor) = 1.0 / 3;
  /// For how many epochs.
  TORCH_ARG(int64_t, total_iters) = 5;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Multiplies the learning rate by factor for the first total_iters epochs.
class TESSERA_API ConstantLR : public EpochSchedule {
 public:
  /// Throws c10::ValueError for a factor out of range.
  explicit ConstantLR(
      torch::optim::Optimizer& optimizer,
      ConstantLROptions options = {});

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;

 private:
  ConstantLROptions options_;
};

/// Options as in Python's LinearLR.
struct TESSERA_API LinearLROptions {
  /// Above 0, up to 1.
  TORCH_ARG(double, start_factor) = 1.0 / 3;
  /// From 0 to 1.
  TORCH_ARG(double, end_factor) = 1.0;
  /// For how many epochs.
  TORCH_ARG(int64_t, total_iters) = 5;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// A warm-up: multiplies the learning rate by a factor that goes from
/// start_factor to end_factor in total_iters epochs, on a straight line.
class TESSERA_API LinearLR : public EpochSchedule {
 public:
  /// Throws c10::ValueError for factors out of range.
  explicit LinearLR(
      torch::optim::Optimizer& optimizer,
      LinearLROptions options = {});

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;

 private:
  LinearLROptions options_;
};

/// Options as in Python's ExponentialLR.
struct TESSERA_API ExponentialLROptions {
  /// With Python's defaults.
  ExponentialLROptions(double gamma) : gamma_(gamma) {}
  /// The factor.
  TORCH_ARG(double, gamma){};
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Multiplies the learning rate by gamma at every epoch.
class TESSERA_API ExponentialLR : public EpochSchedule {
 public:
  /// Throws as EpochSchedule::start() does.
  ExponentialLR(
      torch::optim::Optimizer& optimizer,
      ExponentialLROptions options);

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;

 private:
  ExponentialLROptions options_;
};

/// Options as in Python's PolynomialLR.
struct TESSERA_API PolynomialLROptions {
  /// For how many epochs.
  TORCH_ARG(int64_t, total_iters) = 5;
  /// 1 is a straight line.
  TORCH_ARG(double, power) = 1.0;
  /// -1 to begin, else the epoch to resume after; see EpochSchedule.
  TORCH_ARG(int64_t, last_epoch) = -1;
};

/// Falls to 0 in total_iters epochs, as a power of the epochs that are left.
class TESSERA_API PolynomialLR : public EpochSchedule {
 public:
  /// Throws as EpochSchedule::start() does.
  explicit PolynomialLR(
      torch::optim::Optimizer& optimizer,
      PolynomialLROptions options = {});

 protected:
  std::vector<double> get_lr() const override;
  std::vector<double> closed_form_lr() const override;
  std::vector<OptionField> fields() override;

 private:
  PolynomialLROptions options_;
};

} // namespace tessera::optim
