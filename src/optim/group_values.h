// What schedules read and write in the param groups of an optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// The learning rates, the momentum and the other numbers ("initial_lr") of an
/// optimizer's param groups. Groups are those that the optimizer has now.
class GroupValues {
 public:
  /// One for all schedules of an optimizer.
  static std::shared_ptr<GroupValues> of(torch::optim::Optimizer& optimizer);

  explicit GroupValues(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer) {}

  size_t size() const;
  double lr(size_t group) const;
  void set_lr(size_t group, double lr);

  /// Numbers that are not options of the optimizer's class. Options of
  /// tessera::optim keep them; for other classes they are kept here.
  std::optional<double> find(size_t group, const std::string& key) const;
  void set(size_t group, const std::string& key, double value);
  /// Whether they are in the optimizer's own dictionary.
  bool are_in_optimizer() const;

  enum class Momentum { None, Option, FirstBeta };
  Momentum momentum_kind() const;
  /// Only if there is momentum.
  void set_momentum(size_t group, double momentum);

 private:
  torch::optim::OptimizerOptions& options(size_t group) const;

  torch::optim::Optimizer& optimizer_;
  std::map<std::pair<size_t, std::string>, double> kept_here_;
};

} // namespace tessera::optim
