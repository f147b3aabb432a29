// Schedules that a function of the program gives. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/optim/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::optim {

/// A factor for an epoch.
using LRLambda = std::function<double(int64_t epoch)>;

/// The base learning rate times what a function gives for the epoch. Functions
/// are not saved: "lr_lambdas" is a list of None, as for Python's functions.
class TESSERA_API LambdaLR : public EpochSchedule {
 public:
  /// One function for all param groups, or one for each. Throws c10::ValueError
  /// if their number is another, and for an empty function.
  LambdaLR(
      torch::optim::Optimizer& optimizer,
      const LRLambda& lr_lambda,
      int64_t last_epoch = -1);
  LambdaLR(
      torch::optim::Optimizer& optimizer,
      std::vector<LRLambda> lr_lambdas,
      int64_t last_epoch = -1);

 protected:
  std::vector<double> get_lr() const override;
  void write_more(StateDict& state) const override;
  void read_more(const StateDict& state) override;

 private:
  std::vector<LRLambda> lr_lambdas_; // one per param group
};

/// The learning rate times what a function gives for the epoch, at every step
/// but the first. Functions as LambdaLR's.
class TESSERA_API MultiplicativeLR : public EpochSchedule {
 public:
  /// See LambdaLR.
  MultiplicativeLR(
      torch::optim::Optimizer& optimizer,
      const LRLambda& lr_lambda,
      int64_t last_epoch = -1);
  MultiplicativeLR(
      torch::optim::Optimizer& optimizer,
      std::vector<LRLambda> lr_lambdas,
      int64_t last_epoch = -1);

 protected:
  std::vector<double> get_lr() const override;
  void write_more(StateDict& state) const override;
  void read_more(const StateDict& state) override;

 private:
  std::vector<LRLambda> lr_lambdas_; // one per param group
};

} // namespace tessera::optim
