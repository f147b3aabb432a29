// What optimizer state all ranks together have.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/optim_tensors.h"
#include "transfer/state_census.h"

namespace tessera::transfer {

/// The state that all ranks together have for one tensor of the optimizer.
struct MergedState {
  std::vector<std::pair<std::string, at::ScalarType>> tensors;
  StateDict values;
};

/// [Note: catalogues]
///
/// Which state a parameter has may differ from rank to rank: a rank without
/// elements of the parameter has no state for it. So ranks first tell each
/// other what they have, in small dictionaries:
///
///   {name of the first parameter in a tensor of the optimizer:
///     {"elements": how many of its elements are not padding,
///      "tensors": {name of the state: dtype},
///      "values": {name of the state: value}}}
///
/// The dictionaries of all ranks together grow with the number of ranks, so
/// they do not travel: a StateCensus tells every rank what state each parameter
/// has, see [Note: census]. Only of parameters whose state does not fit
/// together, as far as the census can tell, every rank gets every rank's entry,
/// finds the reason, and throws the same.
class OptimCatalogue {
 public:
  /// `model` must outlive the catalogue; `call` is for errors.
  OptimCatalogue(const ModelParams& model, std::string_view call)
      : model_(model), call_(call) {}

  /// Adds this rank's state of a sharded tensor of the optimizer. Throws
  /// c10::ValueError for state that cannot be cut and joined.
  void add(const OptimTensor& holder, const StateDict& entry);
  /// Merges the catalogues of the group's ranks. Throws on all of them if their
  /// state does not fit together. Collective.
  void exchange(const Group& group);
  /// The merged state of the tensor that holds a sharded parameter; null if no
  /// rank has any.
  const MergedState* find(const ModelParam& param) const;

 private:
  StateDict describe(const OptimTensor& holder, const StateDict& entry) const;
  const std::string& first_in_leaf(const ModelParam& param) const;
  /// The first parameters of the tensors that the group's ranks share.
  using Firsts = std::vector<const ModelParam*>;
  Firsts firsts_of(const Group& group) const;
  bool fits_together(
      const Group& group,
      const ModelParam& param,
      const StateCensus::Found& found) const;
  void compare(const Group& group, const Firsts& params);
  void keep(const std::string& name, const StateDict& entry);
  void check_flat(
      const Group& group,
      const Firsts& params,
      const std::vector<StateDict>& by_rank) const;
  void merge(
      const Group& group,
      const ModelParam& param,
      const std::vector<StateDict>& by_rank);
  void check_all_parts(
      const Group& group,
      const ModelParam& param,
      const std::vector<StateDict>& by_rank,
      bool any) const;

  const ModelParams& model_;
  const std::string_view call_;
  StateDict own_; // this rank's
  std::unordered_map<std::string, MergedState> merged_; // by first_in_leaf()
};

} // namespace tessera::transfer
