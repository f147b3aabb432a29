#include "optim/group_values.h"

#include <tessera/error.h>
#include <tessera/optim/options.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <unordered_map>
#include <variant>

#include "base/mutex.h"
#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

/// Where an optimizer keeps its momentum.
struct MomentumSlot {
  GroupValues::Momentum kind = GroupValues::Momentum::None;
  double* value = nullptr;
  bool* is_set = nullptr; // of an option of tessera::optim
};

MomentumSlot own_momentum(Options& options) {
  for (const OptionField& field : options.fields()) {
    const std::string key = field.key;
    if (key == "betas" && std::holds_alternative<Betas*>(field.slot)) {
      return {
          GroupValues::Momentum::FirstBeta,
          &std::get<0>(*std::get<Betas*>(field.slot)),
          field.is_set};
    }
    if (key == "momentum" && std::holds_alternative<double*>(field.slot)) {
      return {
          GroupValues::Momentum::Option,
          std::get<double*>(field.slot),
          field.is_set};
    }
  }
  return {};
}

template <class T>
double* first_beta(torch::optim::OptimizerOptions& options) {
  auto* found = dynamic_cast<T*>(&options);
  return found == nullptr ? nullptr : &std::get<0>(found->betas());
}

template <class T>
double* momentum(torch::optim::OptimizerOptions& options) {
  auto* found = dynamic_cast<T*>(&options);
  return found == nullptr ? nullptr : &found->momentum();
}

MomentumSlot momentum_of(torch::optim::OptimizerOptions& options) {
  if (auto* own = dynamic_cast<Options*>(&options)) {
    return own_momentum(*own);
  }
  for (double* beta :
       {first_beta<torch::optim::AdamOptions>(options),
        first_beta<torch::optim::AdamWOptions>(options)}) {
    if (beta != nullptr) {
      return {GroupValues::Momentum::FirstBeta, beta};
    }
  }
  for (double* value :
       {momentum<torch::optim::SGDOptions>(options),
        momentum<torch::optim::RMSpropOptions>(options)}) {
    if (value != nullptr) {
      return {GroupValues::Momentum::Option, value};
    }
  }
  return {};
}

} // namespace

std::shared_ptr<GroupValues> GroupValues::of(
    torch::optim::Optimizer& optimizer) {
  static Mutex mutex;
  static std::
      unordered_map<torch::optim::Optimizer*, std::weak_ptr<GroupValues>>
          all TESSERA_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
  // Schedules do not outlive their optimizer, so an address that is used again
  // has no entry left.
  std::weak_ptr<GroupValues>& known = all[&optimizer];
  auto values = known.lock();
  if (!values) {
    values = std::make_shared<GroupValues>(optimizer);
    known = values;
  }
  return values;
}

torch::optim::OptimizerOptions& GroupValues::options(size_t group) const {
  return optimizer_.param_groups().at(group).options();
}

size_t GroupValues::size() const {
  return optimizer_.param_groups().size();
}

double GroupValues::lr(size_t group) const {
  return options(group).get_lr();
}

void GroupValues::set_lr(size_t group, double lr) {
  options(group).set_lr(lr);
}

std::optional<double> GroupValues::find(size_t group, const std::string& key)
    const {
  if (auto* own = dynamic_cast<Options*>(&options(group))) {
    const StateValue* value = own->extra().find(key);
    return value == nullptr ? std::nullopt
                            : std::optional<double>(number_of(*value));
  }
  const auto found = kept_here_.find({group, key});
  return found == kept_here_.end() ? std::nullopt
                                   : std::optional<double>(found->second);
}

void GroupValues::set(size_t group, const std::string& key, double value) {
  if (auto* own = dynamic_cast<Options*>(&options(group))) {
    own->extra().set(key, value);
  } else {
    kept_here_[{group, key}] = value;
  }
}

bool GroupValues::are_in_optimizer() const {
  for (size_t group = 0; group < size(); ++group) {
    if (dynamic_cast<Options*>(&options(group)) == nullptr) {
      return false;
    }
  }
  return true;
}

GroupValues::Momentum GroupValues::momentum_kind() const {
  return size() == 0 ? Momentum::None : momentum_of(options(0)).kind;
}

void GroupValues::set_momentum(size_t group, double value) {
  const MomentumSlot slot = momentum_of(options(group));
  TESSERA_INTERNAL_ASSERT(
      slot.value != nullptr, "a param group has no momentum to schedule");
  *slot.value = value;
  if (slot.is_set != nullptr) {
    *slot.is_set = true;
  }
}

} // namespace tessera::optim
