// The state of a ZeroRedundancyOptimizer: collected from all ranks, and loaded.
#include <tessera/zero/zero_redundancy_optimizer.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/group/all_or_none.h"
#include "optim/dictionary.h"
#include "zero/gather_state.h"
#include "zero/local_state.h"
#include "zero/param_groups.h"

namespace tessera {

/// This rank's part of the state, by the numbers of all parameters, for rank
/// `to`. Throws on all ranks or on none.
StateDict ZeroRedundancyOptimizer::own_state(const char* call, int to) {
  check_is_set_up(call);
  StateDict own;
  comm::all_or_none({group_}, call, [&] {
    if (to < 0 || to >= group_.size()) {
      raise<c10::ValueError>(
          zero::site(group_, call),
          fmt::format(
              "there is no rank {} in group \"{}\" of {}.",
              to,
              group_.name(),
              group_.size()));
    }
    check_untouched();
    give_options_to_local();
    own = zero::with_global_ids(*optim_, param_groups_);
  });
  return own;
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  const StateDict own =
      own_state("ZeroRedundancyOptimizer::consolidate_state_dict", to);
  consolidated_.reset();
  StateDict all = zero::gather_state(group_, to, own);
  if (group_.rank() == to) {
    consolidated_ = std::move(all);
  }
}

StateDict ZeroRedundancyOptimizer::state_dict() const {
  check_is_set_up("ZeroRedundancyOptimizer::state_dict");
  if (!consolidated_) {
    raise(
        zero::site(group_, "ZeroRedundancyOptimizer::state_dict"),
        "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to=...)` on all ranks beforehand if you meant to save the global state.");
  }
  return whole_dict(*consolidated_);
}

/// The state with the options of all groups.
StateDict ZeroRedundancyOptimizer::whole_dict(StateDict state) const {
  const auto access = optim::access_to(*optim_, param_groups_, "state_dict");
  StateList groups;
  int64_t number = 0;
  for (const auto& group : param_groups_) {
    StateDict saved;
    access->write_options(group.options(), saved);
    StateList ids;
    for (size_t i = 0; i < group.params().size(); ++i) {
      ids.emplace_back(number++);
    }
    saved.set("params", std::move(ids));
    groups.emplace_back(std::move(saved));
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

bool ZeroRedundancyOptimizer::has_state() const {
  return optim::has_state(*optim_);
}

StateDict ZeroRedundancyOptimizer::collect_state_dict(optim::Collect to) {
  const StateDict own =
      own_state("ZeroRedundancyOptimizer::collect_state_dict");
  if (to == optim::Collect::Nobody) {
    return whole_dict(zero::share_state(group_, own));
  }
  StateDict result;
  const int num_receivers = to == optim::Collect::Rank0 ? 1 : group_.size();
  for (int rank = 0; rank < num_receivers; ++rank) {
    StateDict all = zero::gather_state(group_, rank, own);
    if (group_.rank() == rank) {
      result = whole_dict(std::move(all));
    }
  }
  return result;
}

bool ZeroRedundancyOptimizer::keeps_state_of(const at::Tensor& param) const {
  check_is_set_up("ZeroRedundancyOptimizer::keeps_state_of");
  const auto& groups = optim_->param_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(
        group.params().begin(),
        group.params().end(),
        [&](const at::Tensor& own) { return own.is_same(param); });
  });
}

std::function<void()> ZeroRedundancyOptimizer::snapshot() {
  check_is_set_up("ZeroRedundancyOptimizer::snapshot");
  give_options_to_local();
  return [this, give_back = optim::snapshot(*optim_)] {
    give_back();
    take_options_from_local();
  };
}

void ZeroRedundancyOptimizer::load_state_dict(const StateDict& dict) {
  check_is_set_up("ZeroRedundancyOptimizer::load_state_dict");
  check_untouched();
  optim::load_state_dict(
      *optim_, zero::local_part_of(dict, *optim_, param_groups_));
  take_options_from_local();
}

void ZeroRedundancyOptimizer::initialize_state() {
  check_is_set_up("ZeroRedundancyOptimizer::initialize_state");
  optim::initialize_state(*optim_);
}

} // namespace tessera
