#include "optim/dictionary.h"

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "optim/sharded_state.h"
#include "optim/state_values.h"
#include "state/part_of.h"

namespace tessera::optim {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";
constexpr const char* kParams = "params";

std::string group_name(size_t index) {
  return fmt::format("param group {}", index);
}

const std::string& name_of(const ParamNames& names, const at::Tensor& param) {
  const auto found = names.find(param.unsafeGetTensorImpl());
  TESSERA_INTERNAL_ASSERT(
      found != names.end(), "a parameter of a named optimizer has no name");
  return found->second;
}

/// Reads a dictionary in two passes: the first checks everything and decides
/// what belongs where, the second writes.
class Reader {
 public:
  Reader(
      torch::optim::Optimizer& optimizer,
      const Access& access,
      const StateDict& dict,
      const ParamNames* names)
      : optimizer_(optimizer),
        access_(access),
        dict_(dict),
        names_(names),
        call_(access.name() + "::load_state_dict") {}

  void read() {
    check_top();
    place_groups();
    for (size_t i = 0; i < groups().size(); ++i) {
      options_.push_back(access_.read_options(
          groups()[i].options(), *saved_of_[i], site(), group_name(i)));
    }
    check_state();
    write();
  }

 private:
  struct Place {
    at::Tensor param;
    size_t group; // ours
  };

  [[noreturn]] void refuse(const std::string& what) const {
    raise<c10::ValueError>(site(), what);
  }

  ErrorSite site() const {
    return {.call = call_};
  }

  std::vector<OptimizerParamGroup>& groups() const {
    return optimizer_.param_groups();
  }

  void check_top() const {
    for (const auto& [key, value] : dict_) {
      if (!(key == StateKey(kState)) && !(key == StateKey(kGroups))) {
        refuse(fmt::format(
            "the dictionary has \"{}\" besides \"state\" and \"param_groups\". Pass the optimizer's part alone.",
            key.text()));
      }
    }
    const StateValue* state = dict_.find(kState);
    const StateValue* groups = dict_.find(kGroups);
    if (state == nullptr || groups == nullptr) {
      refuse(fmt::format(
          "the dictionary has no \"{}\". Pass what state_dict() gave.",
          state == nullptr ? kState : kGroups));
    }
    if (!state->is_dict() || !groups->is_list()) {
      raise<c10::TypeError>(
          site(),
          fmt::format(
              "\"state\" must be a dict and \"param_groups\" a list, they are {} and {}.",
              state->kind(),
              groups->kind()));
    }
  }

  /// The keys of a saved group's parameters.
  std::vector<StateKey> keys_of(const StateDict& saved, size_t index) const {
    const StateValue* params = saved.find(kParams);
    if (params == nullptr || !params->is_list()) {
      refuse(fmt::format(
          "{} has no list \"params\". Pass what state_dict() gave.",
          group_name(index)));
    }
    std::vector<StateKey> keys;
    for (const StateValue& value : params->list()) {
      if (value.is_int() && names_ != nullptr) {
        refuse(fmt::format(
            "{} has the number {}, this optimizer names its parameters. Load a dictionary with names.",
            group_name(index),
            value.to_int()));
      }
      if (!value.is_string() && !value.is_int()) {
        raise<c10::TypeError>(
            site(),
            fmt::format(
                "{}: \"params\" has a value of kind {}, it must be made of names or numbers.",
                group_name(index),
                value.kind()));
      }
      keys.push_back(
          value.is_int() ? StateKey(value.to_int()) : StateKey(value.string()));
    }
    return keys;
  }

  /// Finds the saved group for each of our groups, and the parameter for each
  /// key.
  void place_groups() {
    const StateList& list = dict_.at(kGroups).list();
    if (list.size() != groups().size()) {
      refuse(fmt::format(
          "the dictionary has {} param groups, this optimizer {}. Make the optimizer with the same groups.",
          list.size(),
          groups().size()));
    }
    std::set<StateKey> seen;
    std::vector<std::vector<StateKey>> keys;
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].is_dict()) {
        raise<c10::TypeError>(
            site(),
            fmt::format(
                "{} is of kind {}, must be a dict.",
                group_name(i),
                list[i].kind()));
      }
      keys.push_back(keys_of(list[i].dict(), i));
      for (const StateKey& key : keys.back()) {
        if (!seen.insert(key).second) {
          refuse(fmt::format(
              "{} has parameter \"{}\", which appears twice in the dictionary's groups.",
              group_name(i),
              key.text()));
        }
      }
      if (!list[i].dict().contains("lr")) {
        refuse(fmt::format(
            "{} has no \"lr\". Pass what state_dict() gave.", group_name(i)));
      }
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const size_t from = names_ == nullptr ? i : place_by_name(i, keys);
      if (names_ == nullptr) {
        place_in_order(i, keys[i]);
      }
      saved_of_.push_back(&list[from].dict());
    }
  }

  void place_in_order(size_t index, const std::vector<StateKey>& keys) {
    const auto& params = groups()[index].params();
    if (keys.size() != params.size()) {
      refuse(fmt::format(
          "{} has {} parameters in the dictionary, {} in this optimizer. Make the optimizer with the same parameters in the same groups{}.",
          group_name(index),
          keys.size(),
          params.size(),
          !keys.empty() && !keys.front().is_id()
              ? ", or call set_optimizer_state_dict(), which goes by names"
              : ""));
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!keys[i].is_id()) {
        check_name(keys[i].name(), params[i], group_name(index), site());
      }
      params_.emplace(keys[i], Place{params[i], index});
    }
  }

  /// The position of the saved group that has the names of our group `index`.
  size_t place_by_name(
      size_t index,
      const std::vector<std::vector<StateKey>>& saved) {
    std::set<StateKey> own;
    for (const at::Tensor& param : groups()[index].params()) {
      const StateKey key(name_of(*names_, param));
      own.insert(key);
      params_.emplace(key, Place{param, index});
    }
    for (size_t i = 0; i < saved.size(); ++i) {
      // Groups without parameters are matched by position.
      const bool is_it = own.empty()
          ? i == index && saved[i].empty()
          : std::set<StateKey>(saved[i].begin(), saved[i].end()) == own;
      if (is_it) {
        return i;
      }
    }
    refuse(missing_group(index, own, saved));
  }

  std::string missing_group(
      size_t index,
      const std::set<StateKey>& own,
      const std::vector<std::vector<StateKey>>& saved) const {
    for (const StateKey& key : own) {
      bool found = false;
      for (const auto& keys : saved) {
        found |= std::find(keys.begin(), keys.end(), key) != keys.end();
      }
      if (!found) {
        return fmt::format(
            "no param group of the dictionary has parameter \"{}\".",
            key.text());
      }
    }
    return fmt::format(
        "no param group of the dictionary has exactly the {} parameters of this optimizer's {}. Make the optimizer with the same groups.",
        own.size(),
        group_name(index));
  }

  void check_state() const {
    for (const auto& [key, value] : dict_.at(kState).dict()) {
      const auto found = params_.find(key);
      if (found == params_.end()) {
        refuse(fmt::format(
            "there is state for parameter \"{}\", which no param group has. Take it out of \"state\", or add the parameter.",
            key.text()));
      }
      const std::string label = key.text();
      const ErrorSite where{.call = call_, .parameter = label};
      if (!value.is_dict()) {
        raise<c10::TypeError>(
            where,
            fmt::format(
                "its state is of kind {}, must be a dict.", value.kind()));
      }
      const auto& [param, group] = found->second;
      access_.check_state(
          param,
          *options_[group],
          local_state(param, value.dict(), where),
          where);
    }
  }

  void write() {
    for (size_t i = 0; i < groups().size(); ++i) {
      groups()[i].set_options(std::move(options_[i]));
    }
    const StateDict& state = dict_.at(kState).dict();
    for (const auto& [key, place] : params_) {
      void* const id = place.param.unsafeGetTensorImpl();
      const StateValue* values = state.find(key);
      if (values == nullptr || values->dict().empty() ||
          is_empty_part(place.param, values->dict())) {
        optimizer_.state().erase(id);
        continue;
      }
      const StateDict local = local_state(place.param, values->dict(), site());
      // One parameter at a time, and the old state goes first: the old and the
      // new state at once may not fit in memory.
      if (!is_in_place(place.param, local)) {
        optimizer_.state().erase(id);
      }
      auto loaded = access_.read_state(place.param, local);
      if (loaded) {
        optimizer_.state()[id] = std::move(loaded);
      } else {
        optimizer_.state().erase(id);
      }
    }
  }

  /// Whether some of the values are the optimizer's own tensors, so that the
  /// state to load is in part the state that there is.
  bool is_in_place(const at::Tensor& param, const StateDict& values) const {
    return std::any_of(values.begin(), values.end(), [&](const auto& entry) {
      const auto& [name, value] = entry;
      return value.is_tensor() &&
          is_same_memory(
                 state_tensor_of(optimizer_, param, name), value.tensor());
    });
  }

  torch::optim::Optimizer& optimizer_;
  const Access& access_;
  const StateDict& dict_;
  const ParamNames* names_;
  const std::string call_;
  std::vector<const StateDict*> saved_of_; // by our groups
  std::map<StateKey, Place> params_; // by the dictionary's keys
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

} // namespace

StateDict write_dictionary(
    const torch::optim::Optimizer& optimizer,
    const Access& access,
    const ParamNames* names) {
  StateDict state;
  StateList groups;
  int64_t number = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    StateDict saved;
    access.write_options(group.options(), saved);
    StateList keys;
    for (const at::Tensor& param : group.params()) {
      const StateKey key = names == nullptr ? StateKey(number++)
                                            : StateKey(name_of(*names, param));
      keys.push_back(
          key.is_id() ? StateValue(key.id()) : StateValue(key.name()));
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        StateDict values = access.write_state(*found->second);
        const auto origin = state::find_part_of(param, key.text());
        if (!values.empty()) {
          state.set(
              key,
              origin ? state::marked_as_part(values, *origin)
                     : StateValue(std::move(values)));
        }
      }
    }
    saved.set(kParams, std::move(keys));
    groups.push_back(std::move(saved));
  }
  return {{kState, std::move(state)}, {kGroups, std::move(groups)}};
}

void read_dictionary(
    torch::optim::Optimizer& optimizer,
    const Access& access,
    const StateDict& dict,
    const ParamNames* names) {
  at::NoGradGuard no_grad;
  Reader(optimizer, access, dict, names).read();
}

} // namespace tessera::optim
