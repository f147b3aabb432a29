// Schedules made of schedules. See [Note: schedules].
#pragma once

#include <tessera/api.h>
#include <tessera/optim/lr_scheduler.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::optim {

/// One schedule after another, each from its own beginning:
///
///   SequentialLR schedule(
///       optimizer,
///       {std::make_shared<LinearLR>(optimizer, warmup),
///        std::make_shared<CosineAnnealingLR>(optimizer, 9000)},
///       {1000});
///
/// Sequences and chains cannot be parts of a sequence: give all schedules to
/// one. The parts must not be stepped by themselves.
class TESSERA_API SequentialLR : public LRScheduler {
 public:
  /// The schedules in their order, and the epochs at which each after the first
  /// begins. Throws c10::ValueError if there are none, if one belongs to
  /// another optimizer, or if the milestones are not as many as they must be
  /// and in order.
  SequentialLR(
      torch::optim::Optimizer& optimizer,
      std::vector<std::shared_ptr<EpochSchedule>> schedulers,
      std::vector<int64_t> milestones);

  void step() override;

  /// How many steps were made.
  int64_t last_epoch() const {
    return last_epoch_;
  }

  /// See EpochSchedule; the dictionary has those of the parts.
  StateDict state_dict() override;
  void load_state_dict(const StateDict& state) override;

 private:
  EpochSchedule& part_at(int64_t epoch) const;
  void read(const StateDict& state);

  std::vector<std::shared_ptr<EpochSchedule>> schedulers_;
  std::vector<int64_t> milestones_;
  int64_t last_epoch_ = 0;
};

/// Several schedules at once: each changes what the one before it left.
class TESSERA_API ChainedScheduler : public LRScheduler {
 public:
  /// Throws c10::ValueError if there are none or if their optimizers differ.
  explicit ChainedScheduler(
      std::vector<std::shared_ptr<LRScheduler>> schedulers);

  /// Steps each schedule. If one throws, those before it have been stepped.
  void step() override;

  /// See EpochSchedule; the dictionary has those of the parts.
  StateDict state_dict() override;
  void load_state_dict(const StateDict& state) override;

 private:
  void read(const StateDict& state);

  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
};

} // namespace tessera::optim
