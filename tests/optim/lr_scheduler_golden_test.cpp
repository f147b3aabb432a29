// Python's schedules, step by step; lr_goldens.py writes them.
#include <tessera/optim/options.h>

#include <fstream>

#include "optim/lr_cases.h"
#include "support/ranks.h"

namespace tessera::testing {
namespace {

constexpr double kTolerance = 1e-15;

const Json& goldens() {
  static const Json all = [] {
    std::ifstream file(TESSERA_LR_GOLDENS);
    return Json::parse(file);
  }();
  return all;
}

std::string name_of(const Json& spec) {
  return spec.value("kind", "ReduceLROnPlateau") + "_" +
      spec.at("name").get<std::string>();
}

void expect_near(
    const std::vector<double>& actual,
    const Json& expected,
    const std::string& where) {
  ASSERT_EQ(actual.size(), expected.size()) << where;
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i].get<double>(), kTolerance) << where;
  }
}

double momentum_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* own = dynamic_cast<const optim::SGDOptions*>(&options)) {
    return own->momentum();
  }
  if (const auto* own = dynamic_cast<const optim::AdamWOptions*>(&options)) {
    return std::get<0>(own->betas());
  }
  if (const auto* own = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    return own->momentum();
  }
  if (const auto* other =
          dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return other->momentum();
  }
  if (const auto* other =
          dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return std::get<0>(other->betas());
  }
  return dynamic_cast<const torch::optim::RMSpropOptions&>(options).momentum();
}

std::vector<double> momenta_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> momenta;
  for (auto& group : optimizer.param_groups()) {
    momenta.push_back(momentum_of(group.options()));
  }
  return momenta;
}

std::vector<double> lrs_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (auto& group : optimizer.param_groups()) {
    lrs.push_back(group.options().get_lr());
  }
  return lrs;
}

/// What Python's param groups had, as far as the optimizer can hold it.
void give_groups(torch::optim::Optimizer& optimizer, const Json& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& options = optimizer.param_groups()[i].options();
    options.set_lr(groups[i].at("lr"));
    if (auto* own = dynamic_cast<optim::Options*>(&options)) {
      for (const auto& [key, value] : groups[i].items()) {
        if (key != "lr" && key != "momentum" && key != "betas") {
          own->extra().set(key, value.get<double>());
        }
      }
    }
  }
}

/// Python's dictionary, with numbers of the kinds that are written here: an
/// option is a double where Python keeps the int that it was given, and T_cur
/// an int where Python made a float of it.
StateDict state_in(const Json& json) {
  StateDict state = decoded(json).dict();
  if (StateValue* value = state.find("default_min_lr")) {
    *value = value->is_none() ? StateValue() : StateValue(value->to_double());
  }
  if (StateValue* list = state.find("min_lrs")) {
    for (StateValue& value : list->list()) {
      value = value.to_double();
    }
  }
  if (StateValue* value = state.find("T_cur")) {
    const double number = value->to_double();
    if (number == std::floor(number)) {
      *value = static_cast<int64_t>(number);
    }
  }
  return state;
}

class GoldenCase : public ::testing::TestWithParam<size_t> {
 protected:
  /// As the case begins, or as a resumed run does.
  OptimizerPtr optimizer(Maker maker) const {
    OptimizerPtr made =
        make_optimizer(spec.at("optimizer"), spec["lrs"], maker);
    if (spec.contains("last")) {
      for (size_t i = 0; i < spec["last"].size(); ++i) {
        auto& options =
            static_cast<optim::Options&>(made->param_groups()[i].options());
        options.extra().set("initial_lr", options.get_lr());
        options.set_lr(spec["last"][i]);
      }
    }
    return made;
  }

  /// LibTorch's optimizers cannot hold what a resumed run begins with.
  std::vector<Maker> makers() const {
    return spec.contains("last")
        ? std::vector<Maker>{Maker::Tessera}
        : std::vector<Maker>{Maker::Tessera, Maker::LibTorch};
  }

  void step(optim::LRScheduler& schedule, int64_t index) const {
    if (spec.contains("epochs")) {
      dynamic_cast<optim::CosineAnnealingWarmRestarts&>(schedule).step(
          spec["epochs"][index].get<double>());
    } else {
      schedule.step();
    }
  }

  void expect_values(
      torch::optim::Optimizer& optimizer,
      const optim::LRScheduler& schedule,
      int64_t index) const {
    const std::string where = "after step " + std::to_string(index);
    expect_near(schedule.get_last_lr(), spec["values"][index], where);
    expect_near(lrs_of(optimizer), spec["values"][index], where);
    if (spec.contains("momenta")) {
      expect_near(momenta_of(optimizer), spec["momenta"][index], where);
    }
  }

  const Json& spec = goldens()["cases"][GetParam()];
  const int64_t steps = spec["steps"];
  const int64_t half = spec["half"];
};

TEST_P(GoldenCase, ProducesPyTorchValuesAndDictionary) {
  for (const Maker maker : makers()) {
    SCOPED_TRACE(maker == Maker::Tessera ? "tessera::optim" : "torch::optim");
    const OptimizerPtr owner = optimizer(maker);
    const auto schedule = make_schedule(*owner, spec);
    for (int64_t index = 0; index < steps; ++index) {
      expect_values(*owner, *schedule, index);
      if (index == half) {
        EXPECT_EQ(
            diff_state_dicts(
                schedule->state_dict(),
                state_in(spec["state"]),
                {.rtol = 0, .atol = kTolerance}),
            "");
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
      step(*schedule, index);
    }
    expect_values(*owner, *schedule, steps);
  }
}

TEST_P(GoldenCase, GoesOnFromPythonsDictionary) {
  for (const Maker maker : makers()) {
    SCOPED_TRACE(maker == Maker::Tessera ? "tessera::optim" : "torch::optim");
    const OptimizerPtr owner = optimizer(maker);
    const auto schedule = make_schedule(*owner, spec);
    give_groups(*owner, spec["groups"]);
    schedule->load_state_dict(decoded(spec["state"]).dict());
    EXPECT_EQ(
        diff_state_dicts(schedule->state_dict(), state_in(spec["state"])), "");
    for (int64_t index = half; index < steps; ++index) {
      step(*schedule, index);
      expect_values(*owner, *schedule, index + 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    LrScheduler,
    GoldenCase,
    ::testing::Range(size_t{0}, goldens()["cases"].size()),
    [](const auto& test) { return name_of(goldens()["cases"][test.param]); });

class GoldenPlateau : public ::testing::TestWithParam<size_t> {
 protected:
  const Json& spec = goldens()["plateaus"][GetParam()];
  const size_t half = spec["half"];
  OptimizerPtr owner = make_optimizer("SGD", spec["lrs"], Maker::Tessera);
  optim::ReduceLROnPlateau schedule{*owner, plateau_options(spec["args"])};
};

TEST_P(GoldenPlateau, ProducesPyTorchValuesAndDictionary) {
  EXPECT_EQ(
      diff_state_dicts(schedule.state_dict(), state_in(spec["first_state"])),
      "");
  for (size_t index = 0; index < spec["metrics"].size(); ++index) {
    if (index == half) {
      EXPECT_EQ(
          diff_state_dicts(schedule.state_dict(), state_in(spec["state"])), "");
    }
    schedule.step(spec["metrics"][index]);
    const std::string where = "after metric " + std::to_string(index);
    expect_near(schedule.get_last_lr(), spec["values"][index], where);
    expect_near(lrs_of(*owner), spec["values"][index], where);
  }
}

TEST_P(GoldenPlateau, GoesOnFromPythonsDictionary) {
  optim::ReduceLROnPlateau other(*owner); // settings are in the dictionary
  give_groups(*owner, spec["groups"]);
  other.load_state_dict(decoded(spec["state"]).dict());
  for (size_t index = half; index < spec["metrics"].size(); ++index) {
    other.step(spec["metrics"][index]);
    expect_near(lrs_of(*owner), spec["values"][index], std::to_string(index));
  }
}

INSTANTIATE_TEST_SUITE_P(
    LrScheduler,
    GoldenPlateau,
    ::testing::Range(size_t{0}, goldens()["plateaus"].size()),
    [](const auto& test) {
      return name_of(goldens()["plateaus"][test.param]);
    });

} // namespace
} // namespace tessera::testing
