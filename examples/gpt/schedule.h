#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <vector>

#include "learning_rate.h"
#include "settings.h"

namespace gpt {

/// learning_rate() as a schedule of the library. A checkpoint has the place on
/// the curve; the curve itself is that of the settings, also where the run that
/// saved had another.
class Schedule : public tessera::optim::EpochSchedule {
 public:
  Schedule(torch::optim::Optimizer& optimizer, const Settings& settings)
      : EpochSchedule(optimizer, "Schedule", /*last_epoch=*/-1),
        settings_(settings) {
    start();
  }

  void load_state_dict(const tessera::StateDict& state) override {
    EpochSchedule::load_state_dict(state);
    move_to(last_epoch(), Form::Recursive); // the optimizer was loaded before
  }

 protected:
  std::vector<double> get_lr() const override {
    return std::vector<double>(
        base_lrs().size(), learning_rate(settings_, last_epoch()));
  }

 private:
  const Settings& settings_;
};

} // namespace gpt
