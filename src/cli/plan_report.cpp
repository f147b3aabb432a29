#include "cli/plan_report.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "base/terminal_escapes.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/error.h"
#include "checkpoint/tools/text.h"

namespace tessera::cli {
namespace {

using nlohmann::ordered_json;
using plan::Kind;
using plan::Memory;
using plan::Operation;
using plan::Peak;
using plan::Plan;
using plan::Traffic;
using plan::UnitLine;

std::string bytes(int64_t count) {
  return count == 0 ? "-" : bytes_text(static_cast<uint64_t>(count));
}

/// Names come from files that anyone may have written.
std::string printable(const std::string& name) {
  constexpr size_t kLongest = 80;
  bool is_plain = name.size() <= kLongest;
  for (size_t i = 0; i < name.size(); ++i) {
    is_plain = is_plain && control_length(name, i) == 0;
  }
  return is_plain ? name : format::in_quotes(name);
}

/// "1.31 T", for parameters.
std::string short_count(int64_t count) {
  constexpr struct {
    double unit;
    const char* name;
  } kUnits[]{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  for (const auto& [unit, name] : kUnits) {
    if (static_cast<double>(count) >= unit) {
      return fmt::format("{:.2f} {}", static_cast<double>(count) / unit, name);
    }
  }
  return std::to_string(count);
}

const char* explain(Kind kind, const plan::TrainingSetup& setup) {
  const bool is_sharded = setup.engine == plan::Engine::Sharded;
  switch (kind) {
    case Kind::Shards:
      return is_sharded ? "this rank's part of the parameters"
                        : "all parameters";
    case Kind::Full:
      return is_sharded
          ? "the root's parameters, the unit in use, the one gathered ahead"
          : "nothing is gathered";
    case Kind::Gradients:
      return is_sharded
          ? "a unit's full ones, one reduction in flight, the shards'"
          : "all gradients";
    case Kind::Optimizer:
      return "state of what this rank steps";
    case Kind::Activations:
      return "what backward needs, and what comes and goes";
    case Kind::Buffers:
      return is_sharded ? "kept for the next unit (CPU); buffers of the model"
                        : "buckets of gradients; buffers of the model";
  }
  return "";
}

std::vector<Kind> all_kinds() {
  return {
      Kind::Shards,
      Kind::Full,
      Kind::Gradients,
      Kind::Optimizer,
      Kind::Activations,
      Kind::Buffers};
}

std::vector<Operation> all_operations() {
  return {
      Operation::GatherForward,
      Operation::GatherBackward,
      Operation::ReduceScatter,
      Operation::AllReduce,
      Operation::SendParams,
      Operation::Agreement};
}

std::string memory_table(
    const PlanReport& report,
    const char* title,
    const Peak& peak) {
  std::string text =
      fmt::format("\n{:<28}{:>12}{:>12}\n", title, "at the peak", "at most");
  for (const Kind kind : all_kinds()) {
    if (peak.highest.of(kind) == 0 && kind != Kind::Activations) {
      continue;
    }
    const bool is_unknown =
        kind == Kind::Activations && !report.plan.knows_activations;
    text += fmt::format(
        "  {:<26}{:>12}{:>12}  {}\n",
        name_of(kind),
        is_unknown ? "not known" : bytes(peak.at_peak.of(kind)),
        is_unknown ? "" : bytes(peak.highest.of(kind)),
        explain(kind, report.setup));
  }
  text += fmt::format(
      "  {:<26}{:>12}\n",
      report.plan.knows_activations ? "together" : "without activations",
      bytes(peak.at_peak.total()));
  return text;
}

std::string wire_table(const plan::Wire& wire) {
  std::string text = fmt::format(
      "\n{:<28}{:>12}{:>12}{:>12}\n",
      "on the wire, a step",
      "collectives",
      "tensors",
      "rank sends");
  const auto line = [&](const std::string& name, const Traffic& traffic) {
    text += fmt::format(
        "  {:<26}{:>12}{:>12}{:>12}\n",
        name,
        traffic.collectives,
        bytes(traffic.tensor_bytes),
        bytes(traffic.sent_bytes));
  };
  for (const Operation operation : all_operations()) {
    if (wire.of(operation).collectives > 0) {
      line(name_of(operation), wire.of(operation));
    }
  }
  line("together", wire.total());
  return text;
}

std::string name_of(const UnitLine& unit) {
  return printable(unit.name) +
      (unit.last.empty() ? "" : " to " + printable(unit.last));
}

std::string units_table(const std::vector<UnitLine>& units) {
  constexpr size_t kMostLines = 20;
  size_t width = 26;
  for (const UnitLine& unit : units) {
    width = std::max(width, name_of(unit).size());
  }
  std::string text = fmt::format(
      "\n{:<{}}{:>12}{:>12}{:>12}{:>12}\n",
      "units",
      width + 2,
      "number",
      "parameters",
      "shard",
      "full");
  for (size_t i = 0; i < units.size(); ++i) {
    const bool is_cut = units.size() > kMostLines && i >= kMostLines - 2 &&
        i + 1 < units.size(); // the root is shown
    if (is_cut && i == kMostLines - 2) {
      text += fmt::format(
          "  ... {} more lines; --json has all\n", units.size() - i - 1);
    }
    if (is_cut) {
      continue;
    }
    const UnitLine& unit = units[i];
    text += fmt::format(
        "  {:<{}}{:>12}{:>12}{:>12}{:>12}\n",
        name_of(unit),
        width,
        unit.count,
        short_count(unit.numel),
        bytes(unit.shard_bytes),
        bytes(unit.full_bytes));
  }
  return text;
}

std::string fit_text(const PlanReport& report) {
  const FitReport& fit = *report.fit;
  const int64_t peak = report.plan.device.at_peak.total();
  std::string text = fmt::format(
      "\n{}{}: {} of {} a rank\n",
      fit.fits ? "FITS" : "DOES NOT FIT",
      report.plan.knows_activations ? "" : ", activations not counted",
      bytes(peak),
      bytes(fit.limit_bytes));
  if (fit.grows) {
    text += "  largest " + *fit.grows + " that fits: " +
        (fit.largest ? std::to_string(*fit.largest) : "none, not even 1") +
        (fit.largest_numel
             ? ", " + short_count(*fit.largest_numel) + " parameters"
             : "") +
        "\n";
  }
  text += "  smallest number of ranks: " +
      (fit.smallest_world ? std::to_string(*fit.smallest_world)
                          : "no number is enough") +
      "\n";
  return text;
}

// ---- JSON ------------------------------------------------------------------

ordered_json json_of(const Memory& memory) {
  ordered_json json;
  for (const Kind kind : all_kinds()) {
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
      {"optimizer", name_of(setup.optimizer)},
      {"accumulate", setup.accumulate},
      {"syncs_always", setup.syncs_always},
      {"offload", setup.offload},
      {"device", setup.device == plan::Device::Cpu ? "cpu" : "cuda"}};
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

} // namespace

std::string plan_text(const PlanReport& report) {
  const Plan& plan = report.plan;
  const plan::TrainingSetup& setup = report.setup;
  std::string text = fmt::format(
      "{}: {} parameters in {} tensors\n",
      printable(plan.description),
      short_count(plan.numel),
      plan.num_params);
  text += fmt::format("{} on {} rank(s)", report.strategy, setup.world());
  if (setup.engine == plan::Engine::Sharded && setup.copies > 1) {
    text += fmt::format(
        ": {} copies, each over {} rank(s)", setup.copies, setup.shards);
  }
  text += "\n";
  text += memory_table(
      report,
      setup.device == plan::Device::Cpu ? "memory, a rank"
                                        : "device memory, a rank",
      plan.device);
  if (plan.host.at_peak.total() > 0) {
    text += memory_table(report, "host memory, a rank", plan.host);
  }
  text += wire_table(plan.wire);
  text += units_table(plan.units);
  if (report.fit) {
    text += fit_text(report);
  }
  text += "\nassumed\n";
  for (const std::string& note : report.notes) {
    text += "  " + note + "\n";
  }
  return text;
}

std::string plan_json(const PlanReport& report) {
  const Plan& plan = report.plan;
  ordered_json json{
      {"model",
       {{"description", plan.description},
        {"parameters", plan.numel},
        {"tensors", plan.num_params}}},
      {"setup", json_of(report.setup, report.strategy)},
      {"knows_activations", plan.knows_activations},
      {"device_memory", json_of(plan.device)},
      {"host_memory", json_of(plan.host)},
      {"at_rest", json_of(plan.at_rest)}};
  for (const Operation operation : all_operations()) {
    json["wire"][key_of(operation)] = json_of(plan.wire.of(operation));
  }
  json["wire"]["total"] = json_of(plan.wire.total());
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
  if (report.fit) {
    const FitReport& fit = *report.fit;
    json["fit"] = {
        {"limit_bytes", fit.limit_bytes},
        {"fits", fit.fits},
        {"grows", or_null(fit.grows)},
        {"largest", or_null(fit.largest)},
        {"largest_parameters", or_null(fit.largest_numel)},
        {"smallest_world", or_null(fit.smallest_world)}};
  }
  json["notes"] = report.notes;
  // Names come from files that anyone may have written.
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) +
      "\n";
}

} // namespace tessera::cli
