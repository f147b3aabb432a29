#include "cli/plan_json.h"

#include <nlohmann/json.hpp>

#include "checkpoint/format/dtype.h"

namespace tessera::cli {
namespace {

using nlohmann::ordered_json;
using plan::Memory;
using plan::Peak;
using plan::Plan;
using plan::Traffic;
using plan::UnitLine;

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json json_of(const Memory& memory) {
  ordered_json json;
  for (const plan::Kind kind : plan::all_kinds()) {
    json[name_of(kind)] = memory.of(kind);
  }
  json["total"] = memory.total();
  return json;
}

ordered_json json_of(const Peak& peak) {
  ordered_json highest = json_of(peak.highest);
  highest.erase("total"); // each at its own moment
  return {{"at_peak", json_of(peak.at_peak)}, {"highest", highest}};
}

ordered_json json_of(const Traffic& traffic) {
  return {
      {"collectives", traffic.collectives},
      {"tensor_bytes", traffic.tensor_bytes},
      {"sent_bytes", traffic.sent_bytes}};
}

ordered_json json_of(
    const plan::TrainingSetup& setup,
    const std::string& strategy) {
  const auto name = [](const auto& dtype) {
    return dtype ? ordered_json(std::string(format::info(*dtype).torch_name))
                 : ordered_json(nullptr);
  };
  return {
      {"strategy", strategy},
      {"world", setup.world()},
      {"copies", setup.copies},
      {"shards", setup.shards},
      {"layout", setup.layout == engine::Layout::Kind::Flat ? "flat" : "dim0"},
      {"reshard_after_forward", setup.reshard_after_forward},
      {"dtype", name(setup.dtype)},
      {"param_dtype", name(setup.param_dtype)},
      {"reduce_dtype", name(setup.reduce_dtype)},
      {"keep_cast_shards", setup.keep_cast_shards},
      {"overlap_bytes", or_null(setup.overlap_bytes)},
      {"optimizer", name_of(setup.optimizer)},
      {"accumulate", setup.accumulate},
      {"syncs_always", setup.syncs_always},
      {"offload", setup.offload},
      {"device", setup.device == plan::Device::Cpu ? "cpu" : "cuda"}};
}

} // namespace

std::string plan_json(const plan::Answer& answer) {
  const Plan& plan = answer.plan;
  ordered_json json{
      {"model",
       {{"description", plan.description},
        {"parameters", plan.numel},
        {"tensors", plan.num_params}}},
      {"setup", json_of(answer.setup, answer.strategy)},
      {"knows_activations", plan.knows_activations},
      {"unknown_operators", plan.unknown_operators},
      {"device_memory", json_of(plan.device)},
      {"host_memory", json_of(plan.host)},
      {"at_rest", json_of(plan.at_rest)}};
  for (const plan::Operation operation : plan::all_operations()) {
    json["wire"][key_of(operation)] = json_of(plan.wire.of(operation));
  }
  json["wire"]["total"] = json_of(plan.wire.total());
  if (answer.setup.speeds.are_known()) {
    json["seconds"] = {
        {"computing", plan.time.computing},
        {"sending", plan.time.sending},
        {"waiting", plan.time.waiting},
        {"step", plan.time.together()}};
  }
  json["units"] = ordered_json::array();
  for (const UnitLine& unit : plan.units) {
    json["units"].push_back(
        {{"first", unit.name},
         {"last", unit.last.empty() ? unit.name : unit.last},
         {"count", unit.count},
         {"parameters", unit.numel},
         {"shard_bytes", unit.shard_bytes},
         {"full_bytes", unit.full_bytes}});
  }
  if (answer.fit) {
    const plan::FitAnswer& fit = *answer.fit;
    json["fit"] = {
        {"limit_bytes", fit.limit_bytes},
        {"fits", fit.fits},
        {"grows", or_null(fit.grows)},
        {"largest", or_null(fit.largest)},
        {"largest_parameters", or_null(fit.largest_numel)},
        {"smallest_world", or_null(fit.smallest_world)},
        {"suggestions", ordered_json::array()}};
    for (const plan::Suggestion& suggestion : fit.suggestions) {
      json["fit"]["suggestions"].push_back(
          {{"flags", suggestion.flags},
           {"peak_bytes", suggestion.peak_bytes},
           {"fits", suggestion.fits}});
    }
  }
  json["notes"] = answer.notes;
  // Names come from files that anyone may have written.
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) +
      "\n";
}

} // namespace tessera::cli
