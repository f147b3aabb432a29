#include "transfer/optim_catalogue.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "base/byte_vector.h"
#include "transfer/optim_dict_form.h"

namespace tessera::transfer {
namespace {

constexpr const char* kElements = "elements";
constexpr const char* kTensors = "tensors";
constexpr const char* kValues = "values";

const StateDict* entry_of(const StateDict& catalogue, const std::string& name) {
  const StateValue* entry = catalogue.find(name);
  return entry == nullptr ? nullptr : &entry->dict();
}

/// How many elements of a parameter the ranks of the group have, copies
/// counted.
int64_t elements_of(const Group& group, const ModelParam& param) {
  const engine::Layout& layout = param.layout();
  return group.size() / static_cast<int64_t>(layout.num_ranks()) *
      layout.numel(param.place.index);
}

StateDict without_elements(const StateDict& entry) {
  return {{kTensors, entry.at(kTensors)}, {kValues, entry.at(kValues)}};
}

} // namespace

void OptimCatalogue::add(const OptimTensor& holder, const StateDict& entry) {
  own_.set(holder.members.front()->name, describe(holder, entry));
}

const MergedState* OptimCatalogue::find(const ModelParam& param) const {
  const auto found = merged_.find(first_in_leaf(param));
  return found == merged_.end() ? nullptr : &found->second;
}

StateDict OptimCatalogue::describe(
    const OptimTensor& holder,
    const StateDict& entry) const {
  StateDict tensors;
  StateDict values;
  for (const auto& [key, value] : entry) {
    const std::string& name = key.name();
    if (is_elementwise(name, value, holder.tensor.sizes())) {
      tensors.set(name, static_cast<int64_t>(value.tensor().scalar_type()));
    } else if (value.is_tensor() && value.tensor().dim() > 0) {
      raise<c10::ValueError>(
          {.call = call_, .parameter = holder.members.front()->name},
          fmt::format(
              "its state \"{}\" has the shape [{}], its part of the parameter [{}]. Only state of one value for each element can be cut and joined.",
              name,
              fmt::join(value.tensor().sizes(), ", "),
              fmt::join(holder.tensor.sizes(), ", ")));
    } else if (value.is_sharded()) {
      raise<c10::ValueError>(
          {.call = call_, .parameter = holder.members.front()->name},
          fmt::format(
              "its state \"{}\" is a sharded tensor already; expected what an optimizer's own state dict has.",
              name));
    } else {
      values.set(name, value);
    }
  }
  int64_t elements = 0;
  for (const ModelParam* member : holder.members) {
    elements += member->run().numel;
  }
  return {
      {kElements, elements},
      {kTensors, std::move(tensors)},
      {kValues, std::move(values)}};
}

void OptimCatalogue::exchange(const Group& group) {
  const Firsts params = firsts_of(group);
  StateCensus census(params.size(), group.rank());
  for (size_t i = 0; i < params.size(); ++i) {
    if (const StateDict* entry = entry_of(own_, params[i]->name)) {
      const int64_t elements = entry->at(kElements).to_int();
      census.count(
          i,
          elements,
          params[i]->is_flat() || elements > 0,
          state_dict_to_bytes(without_elements(*entry)));
    }
  }
  census.exchange(group);
  Firsts doubtful;
  for (size_t i = 0; i < params.size(); ++i) {
    const StateCensus::Found found = census.find(i);
    if (found.ranks == 0) {
      continue;
    }
    if (fits_together(group, *params[i], found)) {
      keep(params[i]->name, state_dict_from_bytes(census.description(i)));
    } else {
      doubtful.push_back(params[i]);
    }
  }
  compare(group, doubtful);
}

OptimCatalogue::Firsts OptimCatalogue::firsts_of(const Group& group) const {
  Firsts firsts;
  for (const ModelParam& param : model_.all()) {
    if (param.is_sharded() && first_in_leaf(param) == param.name &&
        param.unit->groups().all.name() == group.name()) {
      firsts.push_back(&param);
    }
  }
  return firsts;
}

/// As far as the census can tell. Where it cannot, compare() decides.
bool OptimCatalogue::fits_together(
    const Group& group,
    const ModelParam& param,
    const StateCensus::Found& found) const {
  if (!found.counts || !found.is_one) {
    return false;
  }
  return param.is_flat() ? found.ranks == group.size()
                         : found.elements == elements_of(group, param);
}

/// Merges what each rank has for these parameters, and throws on all ranks if
/// that does not fit together.
void OptimCatalogue::compare(const Group& group, const Firsts& params) {
  if (params.empty()) {
    return;
  }
  StateDict mine;
  for (const ModelParam* param : params) {
    if (const StateValue* entry = own_.find(param->name)) {
      mine.set(param->name, *entry);
    }
  }
  std::vector<StateDict> by_rank;
  for (const Bytes& bytes :
       group.all_gather_bytes(state_dict_to_bytes(mine), "optimizer state")) {
    by_rank.push_back(state_dict_from_bytes(bytes));
  }
  check_flat(group, params, by_rank);
  for (const ModelParam* param : params) {
    merge(group, *param, by_rank);
  }
}

void OptimCatalogue::keep(const std::string& name, const StateDict& entry) {
  MergedState merged;
  for (const auto& [key, dtype] : entry.at(kTensors).dict()) {
    merged.tensors.emplace_back(
        key.name(), static_cast<at::ScalarType>(dtype.to_int()));
  }
  merged.values = entry.at(kValues).dict();
  merged_.emplace(name, std::move(merged));
}

const std::string& OptimCatalogue::first_in_leaf(
    const ModelParam& param) const {
  return param.is_flat() ? model_.held_by(param.leaf).front()->name
                         : param.name;
}

/// Every rank has elements or padding of a flat parameter, so all ranks have
/// state for it or none has.
void OptimCatalogue::check_flat(
    const Group& group,
    const Firsts& params,
    const std::vector<StateDict>& by_rank) const {
  std::map<int, std::vector<std::string>> missing;
  bool rank0_has_all = true;
  for (const ModelParam* param : params) {
    if (!param->is_flat()) {
      continue;
    }
    std::vector<int> without;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      if (entry_of(by_rank[rank], param->name) == nullptr) {
        without.push_back(group.global_ranks()[rank]);
      }
    }
    if (without.size() == by_rank.size()) {
      continue;
    }
    for (const int rank : without) {
      rank0_has_all = rank0_has_all && rank != group.global_ranks().front();
      for (const ModelParam* member : model_.held_by(param->leaf)) {
        missing[rank].push_back(member->name);
      }
    }
  }
  if (missing.empty()) {
    return;
  }
  std::string text = rank0_has_all
      ? "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some ranks are missing some of those states"
      : "some ranks have optimizer states that others are missing";
  for (const auto& [rank, names] : missing) {
    text += fmt::format(
        "\nRank {} is missing states for the parameters: {}",
        rank,
        fmt::join(names, ", "));
  }
  raise<c10::Error>(
      {.call = call_},
      text + "\nGive the optimizer the same parameters on all ranks.");
}

/// All ranks with elements must have the same state; for a flat parameter all
/// ranks.
void OptimCatalogue::merge(
    const Group& group,
    const ModelParam& param,
    const std::vector<StateDict>& by_rank) {
  const std::string& name = param.name;
  const StateDict* first = nullptr;
  size_t first_rank = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const StateDict* entry = entry_of(by_rank[rank], name);
    const bool counts = entry != nullptr &&
        (param.is_flat() || entry->at(kElements).to_int() > 0);
    if (!counts) {
      continue;
    }
    if (first == nullptr) {
      first = entry;
      first_rank = rank;
      continue;
    }
    const std::string difference =
        diff_state_dicts(without_elements(*first), without_elements(*entry));
    if (!difference.empty()) {
      raise<c10::ValueError>(
          {.call = call_, .parameter = name},
          fmt::format(
              "ranks {} and {} have different state:\n{}",
              group.global_ranks()[first_rank],
              group.global_ranks()[rank],
              difference));
    }
  }
  check_all_parts(group, param, by_rank, first != nullptr);
  if (first == nullptr) { // ranks without elements may have values
    for (const StateDict& catalogue : by_rank) {
      first = first == nullptr ? entry_of(catalogue, name) : first;
    }
  }
  if (first != nullptr) {
    keep(name, *first);
  }
}

void OptimCatalogue::check_all_parts(
    const Group& group,
    const ModelParam& param,
    const std::vector<StateDict>& by_rank,
    bool any) const {
  if (!any || param.is_flat()) {
    return;
  }
  int64_t elements = 0;
  std::vector<int> having;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (const StateDict* entry = entry_of(by_rank[rank], param.name)) {
      elements += entry->at(kElements).to_int();
      having.push_back(group.global_ranks()[rank]);
    }
  }
  const int64_t expected = elements_of(group, param);
  if (elements != expected) {
    raise<c10::ValueError>(
        {.call = call_, .parameter = param.name},
        fmt::format(
            "only ranks {} have state for it, {} of {} elements. Give the optimizer the same parameters on all ranks.",
            fmt::join(having, ", "),
            elements,
            expected));
  }
}

} // namespace tessera::transfer
