#include "zero/local_state.h"

#include <tessera/error.h>
#include <tessera/optim/state_dict.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "optim/dictionary.h"

namespace tessera::zero {
namespace {

using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";
constexpr const char* kParams = "params";
constexpr const char* kCall = "ZeroRedundancyOptimizer::load_state_dict";

[[noreturn]] void refuse(const std::string& what) {
  raise<c10::ValueError>({.call = kCall}, what);
}

/// A dictionary of all parameters, checked against them.
class Whole {
 public:
  Whole(
      const StateDict& dict,
      const torch::optim::Optimizer& local,
      const Groups& groups)
      : groups_(groups),
        access_(optim::access_to(local, groups, "load_state_dict")) {
    check_top(dict);
    state_ = &dict.at(kState).dict();
    read_groups(dict.at(kGroups).list());
    check_state();
  }

  /// A group's options as they were saved.
  const StateDict& saved_group(size_t index) const {
    return *saved_groups_[index];
  }
  /// Null if the parameter has no state.
  const StateValue* state_of(const at::Tensor& param) const {
    const StateValue* value =
        state_->find(keys_.at(param.unsafeGetTensorImpl()));
    return value == nullptr || value->is_none() ? nullptr : value;
  }

 private:
  struct Place {
    at::Tensor param;
    size_t group;
  };

  static void check_top(const StateDict& dict) {
    for (const char* key : {kState, kGroups}) {
      if (!dict.contains(key)) {
        refuse(fmt::format(
            "the dictionary has no \"{}\". Pass what state_dict() gave.", key));
      }
    }
    if (!dict.at(kState).is_dict() || !dict.at(kGroups).is_list()) {
      raise<c10::TypeError>(
          {.call = kCall},
          fmt::format(
              "\"state\" must be a dict and \"param_groups\" a list, they are {} and {}.",
              dict.at(kState).kind(),
              dict.at(kGroups).kind()));
    }
    if (dict.size() != 2) {
      refuse(
          "the dictionary has more than \"state\" and \"param_groups\". Pass the optimizer's part alone.");
    }
  }

  void read_groups(const StateList& saved) {
    if (saved.size() != groups_.size()) {
      refuse(fmt::format(
          "the dictionary has {} param groups, this optimizer {}. Make the optimizer with the same groups.",
          saved.size(),
          groups_.size()));
    }
    for (size_t i = 0; i < saved.size(); ++i) {
      const StateValue* ids =
          saved[i].is_dict() ? saved[i].dict().find(kParams) : nullptr;
      if (ids == nullptr || !ids->is_list()) {
        refuse(fmt::format(
            "param group {} has no list \"params\". Pass what state_dict() gave.",
            i));
      }
      place_params(i, ids->list());
      saved_groups_.push_back(&saved[i].dict());
      options_.push_back(access_->read_options(
          groups_[i].options(),
          saved[i].dict(),
          {.call = kCall},
          fmt::format("param group {}", i)));
    }
  }

  void place_params(size_t group, const StateList& ids) {
    const auto& params = groups_[group].params();
    if (ids.size() != params.size()) {
      refuse(fmt::format(
          "param group {} has {} parameters in the dictionary, {} in this optimizer. Make the optimizer with the same parameters in the same groups.",
          group,
          ids.size(),
          params.size()));
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!ids[i].is_int()) {
        refuse(fmt::format(
            "\"params\" of param group {} has a value of kind {}, this optimizer numbers its parameters. Load a dictionary with numbers.",
            group,
            ids[i].kind()));
      }
      const StateKey key(ids[i].to_int());
      if (!places_.emplace(key, Place{params[i], group}).second) {
        refuse(fmt::format(
            "parameter {} appears twice in the dictionary's groups.",
            key.text()));
      }
      keys_.emplace(params[i].unsafeGetTensorImpl(), key);
    }
  }

  void check_state() const {
    for (const auto& [key, value] : *state_) {
      const std::string label = key.text();
      const ErrorSite where{.call = kCall, .parameter = label};
      const auto found = places_.find(key);
      if (found == places_.end()) {
        raise<c10::ValueError>(
            where,
            "there is state for it, but no param group has it. Take it out of \"state\", or add the parameter.");
      }
      if (value.is_none()) {
        continue;
      }
      if (!value.is_dict()) {
        raise<c10::TypeError>(
            where,
            fmt::format(
                "its state is of kind {}, must be a dict.", value.kind()));
      }
      const Place& place = found->second;
      access_->check_state(
          place.param, *options_[place.group], value.dict(), where);
    }
  }

  const Groups& groups_;
  const std::unique_ptr<optim::Access> access_;
  const StateDict* state_ = nullptr;
  std::vector<const StateDict*> saved_groups_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
  std::map<StateKey, Place> places_;
  std::unordered_map<const c10::TensorImpl*, StateKey> keys_;
};

} // namespace

StateDict with_global_ids(
    const torch::optim::Optimizer& local,
    const Groups& groups) {
  std::unordered_map<const c10::TensorImpl*, int64_t> ids;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      ids.emplace(param.unsafeGetTensorImpl(), ids.size());
    }
  }
  const StateDict dict = optim::state_dict(local);
  const StateDict& state = dict.at(kState).dict();
  StateDict result;
  int64_t number = 0;
  for (const OptimizerParamGroup& group : local.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (const StateValue* value = state.find(number++)) {
        result.set(ids.at(param.unsafeGetTensorImpl()), *value);
      }
    }
  }
  return result;
}

StateDict local_part_of(
    const StateDict& dict,
    const torch::optim::Optimizer& local,
    const Groups& groups) {
  const Whole whole(dict, local, groups);
  StateDict state;
  StateList saved;
  int64_t number = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    StateDict group = whole.saved_group(i);
    StateList ids;
    for (const at::Tensor& param : local.param_groups()[i].params()) {
      if (const StateValue* value = whole.state_of(param)) {
        state.set(number, *value);
      }
      ids.emplace_back(number++);
    }
    group.set(kParams, std::move(ids));
    saved.emplace_back(std::move(group));
  }
  return {{kState, std::move(state)}, {kGroups, std::move(saved)}};
}

} // namespace tessera::zero
