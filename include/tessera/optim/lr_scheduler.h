#pragma once

#include <tessera/api.h>
#include <tessera/optim/options.h>
#include <tessera/state/stateful.h>

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::optim {

class GroupValues;

/// [Note: schedules]
///
/// Learning-rate schedules with the names, the arithmetic and the dictionaries
/// of Python's torch.optim.lr_scheduler. Making a schedule sets the learning
/// rates of the first step; then, as in Python:
///
///   optimizer.step();
///   schedule.step();
///
/// Most schedules are recursive: they change the learning rate that a param
/// group has now, so that several schedules may act on one optimizer, and a
/// group that is added later is scheduled from its own learning rate. Floating
/// point operations are made in Python's order.
///
/// A schedule works on any optimizer of tessera::optim or torch::optim,
/// NamedOptimizer and ZeroRedundancyOptimizer included, and must not outlive
/// the optimizer. Python keeps "initial_lr" and its kin in the param groups.
/// Options of tessera::optim keep them there too, so that they are in the
/// optimizer's dictionary. LibTorch's options have no room for them: there the
/// schedules of an optimizer share them among themselves, for as long as one of
/// these schedules lives.
///
/// No function of a schedule is collective, except
/// ReduceLROnPlateau::step(): all ranks make the same calls and get the same
/// values. Schedules are not thread-safe.

/// A schedule of the learning rates of one optimizer.
class TESSERA_API LRScheduler : public Stateful {
 public:
  ~LRScheduler() override;
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Sets the learning rates for the next step of the optimizer. If it throws,
  /// schedule and optimizer are as they were, except in a ChainedScheduler.
  virtual void step() = 0;

  /// The learning rates that were set last, one per param group.
  const std::vector<double>& get_last_lr() const {
    return last_lr_;
  }
  /// The optimizer whose learning rates are set.
  torch::optim::Optimizer& optimizer() const {
    return optimizer_;
  }
  /// The class's name, for errors: "StepLR".
  const std::string& name() const {
    return name_;
  }

 protected:
  /// `name` is the class's, for errors.
  LRScheduler(torch::optim::Optimizer& optimizer, std::string name);

  /// The learning rates that the param groups have now.
  std::vector<double> current_lrs() const;
  /// The param groups, for the schedules of this library.
  GroupValues& groups() const {
    return *groups_;
  }

  /// Python's _last_lr.
  std::vector<double> last_lr_;

 private:
  torch::optim::Optimizer& optimizer_;
  std::string name_;
  std::shared_ptr<GroupValues> groups_; // shared by the optimizer's schedules
};

/// A schedule that computes learning rates from the number of steps that were
/// made, Python's "epoch".
///
/// To write another schedule, derive from this class: compute the learning
/// rates in get_lr(), name the settings in fields(), and call start() at the
/// end of the constructor.
class TESSERA_API EpochSchedule : public LRScheduler {
 public:
  /// Throws c10::ValueError if a learning rate would not be finite, and if a
  /// param group was added whose learning rate this schedule cannot compute.
  void step() override;

  /// How many steps were made.
  int64_t last_epoch() const {
    return last_epoch_;
  }
  /// The learning rates of the param groups when the first schedule was made.
  const std::vector<double>& base_lrs() const {
    return base_lrs_;
  }

  /// The dictionary of Python's class, key for key. Not collective.
  StateDict state_dict() override;
  /// Takes a dictionary of this class or of Python's: settings are replaced
  /// too, as in Python. The learning rates of the optimizer are not changed:
  /// load the optimizer's own dictionary. Throws c10::ValueError for keys that
  /// are missing or unknown and c10::TypeError for values of another kind; the
  /// schedule is as it was then. Not collective.
  void load_state_dict(const StateDict& state) override;

 protected:
  /// `last_epoch` as in Python: -1 to begin, else the epoch to resume after,
  /// for an optimizer whose param groups have "initial_lr".
  EpochSchedule(
      torch::optim::Optimizer& optimizer,
      std::string name,
      int64_t last_epoch);

  /// Python's initial step. Throws c10::ValueError if last_epoch is not -1 and
  /// a param group has no "initial_lr".
  void start();

  /// The learning rates for last_epoch(), recursive where it can be.
  virtual std::vector<double> get_lr() const = 0;
  /// The same from base_lrs() alone, where there is such a formula.
  /// SequentialLR asks for it when a schedule's turn comes.
  virtual std::vector<double> closed_form_lr() const;
  /// Settings and counts besides those of this class, by Python's names.
  virtual std::vector<OptionField> fields();
  /// Values of the dictionary that are not fields.
  virtual void write_more(StateDict& state) const;
  virtual void read_more(const StateDict& state);
  /// Sets the learning rates, after they have been checked.
  virtual void set_lrs(const std::vector<double>& lrs);

  /// current_lrs(), each times `factor`.
  std::vector<double> scaled_lrs(double factor) const;
  /// Throws c10::ValueError unless every param group has a base learning rate.
  void need_base_lrs() const;
  /// Which formula is meant.
  enum class Form {
    Recursive, ///< get_lr()
    Closed, ///< closed_form_lr()
  };
  /// Goes to an epoch. If it throws, nothing has changed.
  void move_to(int64_t epoch, Form form);

  /// True inside start().
  bool is_initial() const {
    return is_initial_;
  }

 private:
  friend class SequentialLR;

  void initial_step();
  std::vector<OptionField> all_fields();
  void read(const StateDict& state);

  int64_t last_epoch_;
  int64_t step_count_ = 0; // steps since start(), which makes the first
  bool is_initial_ = false;
  std::vector<double> base_lrs_;
};

/// One number for all param groups, or a number for each.
class TESSERA_API PerGroup {
 public:
  /// A number, or a list of numbers, where one of these is expected.
  PerGroup(double value) : values_(value) {}
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}
  PerGroup(std::initializer_list<double> values)
      : values_(std::vector<double>(values)) {}

  /// The number that is meant for all groups; nothing if each has its own.
  std::optional<double> for_all() const;
  /// A number for each of `num_groups`. Throws c10::ValueError if there are
  /// others; `key` and `call` are for errors.
  std::vector<double> for_groups(
      size_t num_groups,
      std::string_view key,
      std::string_view call) const;

 private:
  std::variant<double, std::vector<double>> values_;
};

} // namespace tessera::optim
