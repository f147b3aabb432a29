// Schedules as lr_goldens.json describes them.
#pragma once

#include <tessera/optim/adamw.h>
#include <tessera/optim/cosine_lr.h>
#include <tessera/optim/lambda_lr.h>
#include <tessera/optim/lr_schedules.h>
#include <tessera/optim/one_cycle_lr.h>
#include <tessera/optim/reduce_lr_on_plateau.h>
#include <tessera/optim/rmsprop.h>
#include <tessera/optim/sequential_lr.h>
#include <tessera/optim/sgd.h>

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::testing {

using Json = nlohmann::json;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

/// Whose optimizers are scheduled.
enum class Maker { Tessera, LibTorch };

template <class Optimizer, class Options>
OptimizerPtr make_with_groups(const Json& lrs, const Options& defaults) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : lrs) {
    auto options = std::make_unique<Options>(defaults);
    options->lr(lr);
    groups.emplace_back(
        std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())},
        std::move(options));
  }
  return std::make_unique<Optimizer>(groups, defaults);
}

/// With the options of lr_goldens.py's OPTIMIZERS.
inline OptimizerPtr make_optimizer(
    const std::string& kind,
    const Json& lrs,
    Maker maker) {
  const bool own = maker == Maker::Tessera;
  if (kind == "SGD") {
    return own ? make_with_groups<optim::SGD>(
                     lrs, optim::SGDOptions(0.1).momentum(0.9))
               : make_with_groups<torch::optim::SGD>(
                     lrs, torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  if (kind == "AdamW") {
    return own ? make_with_groups<optim::AdamW>(lrs, optim::AdamWOptions(0.1))
               : make_with_groups<torch::optim::AdamW>(
                     lrs, torch::optim::AdamWOptions(0.1));
  }
  if (kind == "RMSprop") {
    return own ? make_with_groups<optim::RMSprop>(
                     lrs, optim::RMSpropOptions(0.1).momentum(0.5))
               : make_with_groups<torch::optim::RMSprop>(
                     lrs, torch::optim::RMSpropOptions(0.1).momentum(0.5));
  }
  throw std::runtime_error("lr_goldens.json: no optimizer " + kind);
}

inline optim::LRLambda lambda_named(const std::string& name) {
  if (name == "power") {
    return [](int64_t epoch) {
      return std::pow(0.95, static_cast<double>(epoch));
    };
  }
  return
      [](int64_t epoch) { return 1 / (1 + 0.05 * static_cast<double>(epoch)); };
}

/// Options by Python's names.
class Arguments {
 public:
  explicit Arguments(const Json& args) : args_(args) {}

  template <class T>
  T get(const char* key) const {
    return args_.at(key).get<T>();
  }
  /// Calls `set` with the value, if there is one.
  template <class T, class Set>
  void if_given(const char* key, const Set& set) const {
    if (args_.contains(key)) {
      set(args_.at(key).get<T>());
    }
  }
  template <class Set>
  void if_per_group(const char* key, const Set& set) const {
    if (args_.contains(key)) {
      const Json& value = args_.at(key);
      set(value.is_array() ? optim::PerGroup(value.get<std::vector<double>>())
                           : optim::PerGroup(value.get<double>()));
    }
  }
  const Json& json() const {
    return args_;
  }

 private:
  const Json& args_;
};

#define TESSERA_SET(T, options, name) \
  given.if_given<T>(#name, [&](const T& value) { (options).name(value); })

template <class Schedule>
std::shared_ptr<optim::EpochSchedule> make_lambda(
    torch::optim::Optimizer& optimizer,
    const Json& args) {
  const Json& names = args.at("lr_lambda");
  const int64_t last = args.value("last_epoch", int64_t{-1});
  if (!names.is_array()) {
    return std::make_shared<Schedule>(optimizer, lambda_named(names), last);
  }
  std::vector<optim::LRLambda> lambdas;
  for (const std::string name : names) {
    lambdas.push_back(lambda_named(name));
  }
  return std::make_shared<Schedule>(optimizer, lambdas, last);
}

inline std::shared_ptr<optim::EpochSchedule> make_one_cycle(
    torch::optim::Optimizer& optimizer,
    const Arguments& given) {
  optim::OneCycleLROptions options(0.0);
  given.if_per_group("max_lr", [&](auto value) { options.max_lr(value); });
  given.if_per_group(
      "base_momentum", [&](auto value) { options.base_momentum(value); });
  given.if_per_group(
      "max_momentum", [&](auto value) { options.max_momentum(value); });
  given.if_given<int64_t>(
      "epochs_", [&](int64_t value) { options.epochs(value); });
  TESSERA_SET(int64_t, options, total_steps);
  TESSERA_SET(int64_t, options, steps_per_epoch);
  TESSERA_SET(double, options, pct_start);
  TESSERA_SET(bool, options, cycle_momentum);
  TESSERA_SET(double, options, div_factor);
  TESSERA_SET(double, options, final_div_factor);
  TESSERA_SET(bool, options, three_phase);
  given.if_given<std::string>("anneal_strategy", [&](const std::string& name) {
    options.anneal_strategy(
        name == "cos" ? optim::AnnealStrategy::Cos
                      : optim::AnnealStrategy::Linear);
  });
  return std::make_shared<optim::OneCycleLR>(optimizer, options);
}

inline std::shared_ptr<optim::EpochSchedule> make_part(
    torch::optim::Optimizer& optimizer,
    const std::string& kind,
    const Json& args) {
  const Arguments given(args);
  if (kind == "LambdaLR") {
    return make_lambda<optim::LambdaLR>(optimizer, args);
  }
  if (kind == "MultiplicativeLR") {
    return make_lambda<optim::MultiplicativeLR>(optimizer, args);
  }
  if (kind == "StepLR") {
    optim::StepLROptions options(given.get<int64_t>("step_size"));
    TESSERA_SET(double, options, gamma);
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::StepLR>(optimizer, options);
  }
  if (kind == "MultiStepLR") {
    optim::MultiStepLROptions options(
        given.get<std::vector<int64_t>>("milestones"));
    TESSERA_SET(double, options, gamma);
    return std::make_shared<optim::MultiStepLR>(optimizer, options);
  }
  if (kind == "ConstantLR") {
    optim::ConstantLROptions options;
    TESSERA_SET(double, options, factor);
    TESSERA_SET(int64_t, options, total_iters);
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::ConstantLR>(optimizer, options);
  }
  if (kind == "LinearLR") {
    optim::LinearLROptions options;
    TESSERA_SET(double, options, start_factor);
    TESSERA_SET(double, options, end_factor);
    TESSERA_SET(int64_t, options, total_iters);
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::LinearLR>(optimizer, options);
  }
  if (kind == "ExponentialLR") {
    optim::ExponentialLROptions options(given.get<double>("gamma"));
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::ExponentialLR>(optimizer, options);
  }
  if (kind == "PolynomialLR") {
    optim::PolynomialLROptions options;
    TESSERA_SET(int64_t, options, total_iters);
    TESSERA_SET(double, options, power);
    return std::make_shared<optim::PolynomialLR>(optimizer, options);
  }
  if (kind == "CosineAnnealingLR") {
    optim::CosineAnnealingLROptions options(given.get<int64_t>("T_max"));
    TESSERA_SET(double, options, eta_min);
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::CosineAnnealingLR>(optimizer, options);
  }
  if (kind == "CosineAnnealingWarmRestarts") {
    optim::CosineAnnealingWarmRestartsOptions options(
        given.get<int64_t>("T_0"));
    TESSERA_SET(int64_t, options, T_mult);
    TESSERA_SET(double, options, eta_min);
    TESSERA_SET(int64_t, options, last_epoch);
    return std::make_shared<optim::CosineAnnealingWarmRestarts>(
        optimizer, options);
  }
  if (kind == "OneCycleLR") {
    return make_one_cycle(optimizer, given);
  }
  throw std::runtime_error("lr_goldens.json: no schedule " + kind);
}

inline std::shared_ptr<optim::LRScheduler> make_schedule(
    torch::optim::Optimizer& optimizer,
    const Json& spec) {
  const std::string kind = spec.at("kind");
  if (!spec.contains("parts")) {
    return make_part(optimizer, kind, spec.at("args"));
  }
  std::vector<std::shared_ptr<optim::EpochSchedule>> parts;
  for (const Json& part : spec.at("parts")) {
    parts.push_back(make_part(optimizer, part.at("kind"), part.at("args")));
  }
  if (kind == "SequentialLR") {
    return std::make_shared<optim::SequentialLR>(
        optimizer,
        parts,
        spec.at("args").at("milestones").get<std::vector<int64_t>>());
  }
  return std::make_shared<optim::ChainedScheduler>(
      std::vector<std::shared_ptr<optim::LRScheduler>>(
          parts.begin(), parts.end()));
}

inline optim::ReduceLROnPlateauOptions plateau_options(const Json& args) {
  const Arguments given(args);
  optim::ReduceLROnPlateauOptions options;
  TESSERA_SET(double, options, factor);
  TESSERA_SET(int64_t, options, patience);
  TESSERA_SET(double, options, threshold);
  TESSERA_SET(int64_t, options, cooldown);
  TESSERA_SET(double, options, eps);
  given.if_per_group("min_lr", [&](auto value) { options.min_lr(value); });
  if (args.value("mode", "min") == "max") {
    options.mode(optim::PlateauMode::Max);
  }
  if (args.value("threshold_mode", "rel") == "abs") {
    options.threshold_mode(optim::ThresholdMode::Abs);
  }
  return options;
}

#undef TESSERA_SET

/// A value that lr_goldens.py's encoded() wrote.
inline StateValue decoded(const Json& json) {
  if (json.is_null()) {
    return nullptr;
  }
  if (json.is_boolean()) {
    return json.get<bool>();
  }
  if (json.is_number_integer()) {
    return json.get<int64_t>();
  }
  if (json.is_number_float()) {
    return json.get<double>();
  }
  if (json.is_string()) {
    return json.get<std::string>();
  }
  if (json.is_array()) {
    StateList list;
    for (const Json& item : json) {
      list.push_back(decoded(item));
    }
    return list;
  }
  if (json.contains("float")) {
    const double infinite = std::numeric_limits<double>::infinity();
    return json.at("float") == "inf" ? infinite : -infinite;
  }
  StateDict dict;
  if (json.contains("items")) {
    for (const Json& item : json.at("items")) {
      dict.set(item.at(0).get<int64_t>(), decoded(item.at(1)));
    }
    return dict;
  }
  for (const auto& [key, item] : json.items()) {
    dict.set(key, decoded(item));
  }
  return dict;
}

} // namespace tessera::testing
