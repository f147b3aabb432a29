#include "cli/plan_text.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "base/terminal_escapes.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/tools/checkpoint_text.h"

namespace tessera::cli {
namespace {

using plan::Kind;
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
      return is_sharded ? "the root, the unit in use, units gathered ahead"
                        : "nothing is gathered";
    case Kind::Gradients:
      return is_sharded
          ? "full gradients of a unit, reductions in flight, shards"
          : "all gradients";
    case Kind::Optimizer:
      return "state of what this rank steps";
    case Kind::Activations:
      return "saved for backward, and temporaries";
    case Kind::Buffers:
      return is_sharded ? "kept for the next unit (CPU); buffers of the model"
                        : "buckets of gradients; buffers of the model";
  }
  return "";
}

std::string heading_line(const Style& style, const std::string& heading) {
  return "\n" + style.heading(heading) + "\n";
}

std::string memory_table(
    const plan::Answer& answer,
    const char* title,
    const Peak& peak,
    const Style& style) {
  std::string text = heading_line(
      style,
      fmt::format("{:<28}{:>12}{:>12}", title, "at the peak", "at most"));
  for (const Kind kind : plan::all_kinds()) {
    if (peak.highest.of(kind) == 0 && kind != Kind::Activations) {
      continue;
    }
    const bool is_unknown =
        kind == Kind::Activations && !answer.plan.knows_activations;
    text += fmt::format(
        "  {:<26}{:>12}{:>12}  {}\n",
        name_of(kind),
        is_unknown ? "not known" : bytes(peak.at_peak.of(kind)),
        is_unknown ? "" : bytes(peak.highest.of(kind)),
        explain(kind, answer.setup));
  }
  text += fmt::format(
      "  {:<26}{:>12}\n",
      answer.plan.knows_activations ? "together" : "without activations",
      bytes(peak.at_peak.total()));
  return text;
}

std::string wire_table(const plan::Wire& wire, const Style& style) {
  std::string text = heading_line(
      style,
      fmt::format(
          "{:<28}{:>12}{:>12}{:>12}",
          "on the wire per step",
          "collectives",
          "tensors",
          "rank sends"));
  const auto line = [&](const std::string& name, const Traffic& traffic) {
    text += fmt::format(
        "  {:<26}{:>12}{:>12}{:>12}\n",
        name,
        traffic.collectives,
        bytes(traffic.tensor_bytes),
        bytes(traffic.sent_bytes));
  };
  for (const Operation operation : plan::all_operations()) {
    if (wire.of(operation).collectives > 0) {
      line(name_of(operation), wire.of(operation));
    }
  }
  line("together", wire.total());
  return text;
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.2f} ms", seconds * 1e3);
}

std::string time_table(const plan::StepTime& time, const Style& style) {
  std::string text = heading_line(style, "time per step");
  const auto line = [&](const char* name, double seconds, const auto& words) {
    text +=
        fmt::format("  {:<26}{:>12}  {}\n", name, milliseconds(seconds), words);
  };
  line("computing", time.computing, "forward and backward");
  line(
      "sending",
      time.sending,
      milliseconds(time.hidden()) + " of it while computing");
  line("waiting", time.waiting, "for the wire");
  line("together", time.together(), "computing and waiting");
  return text;
}

std::string name_of(const UnitLine& unit) {
  return printable(unit.name) +
      (unit.last.empty() ? "" : " to " + printable(unit.last));
}

std::string units_table(
    const std::vector<UnitLine>& units,
    const Style& style) {
  constexpr size_t kMostLines = 20;
  size_t width = 26;
  for (const UnitLine& unit : units) {
    width = std::max(width, name_of(unit).size());
  }
  std::string text = heading_line(
      style,
      fmt::format(
          "{:<{}}{:>12}{:>12}{:>12}{:>12}",
          "units",
          width + 2,
          "number",
          "parameters",
          "shard",
          "full"));
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

std::string words_text(const Plan& plan, const Style& style) {
  std::string text = heading_line(style, "words") +
      "  at the peak: when all kinds together are largest; at most: the largest that the kind itself becomes\n";
  if (!plan.units.empty()) {
    text +=
        "  unit: parameters that are gathered together; the root has those that no other unit has\n";
  }
  return text +
      "  tensors: the tensors as a whole; rank sends: what one rank sends of them\n"
      "  1 GB is 10^9 bytes\n";
}

std::string suggestions_table(
    const plan::FitAnswer& fit,
    int64_t peak,
    const Style& style) {
  if (fit.suggestions.empty()) {
    return "";
  }
  size_t width = 26;
  for (const plan::Suggestion& suggestion : fit.suggestions) {
    width = std::max(width, suggestion.flags.size());
  }
  std::string text = heading_line(
      style,
      fmt::format(
          "{:<{}}{:>12}{:>12}",
          "what would help",
          width + 2,
          "peak",
          "less by"));
  for (const plan::Suggestion& suggestion : fit.suggestions) {
    text += fmt::format(
        "  {:<{}}{:>12}{:>12}  {}\n",
        suggestion.flags,
        width,
        bytes(suggestion.peak_bytes),
        bytes(peak - suggestion.peak_bytes),
        suggestion.fits ? style.good("fits") : "does not fit yet");
  }
  return text;
}

std::string fit_text(const plan::Answer& answer, const Style& style) {
  const plan::FitAnswer& fit = *answer.fit;
  const int64_t peak = answer.plan.device.at_peak.total();
  std::string text = fmt::format(
      "\n{}{}: {} of {} per rank\n",
      fit.fits ? style.good("FITS") : style.bad("DOES NOT FIT"),
      answer.plan.knows_activations ? "" : ", activations not counted",
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
  return text + suggestions_table(fit, peak, style);
}

} // namespace

std::string plan_text(const plan::Answer& answer, const Style& style) {
  const Plan& plan = answer.plan;
  const plan::TrainingSetup& setup = answer.setup;
  std::string text = fmt::format(
      "{}: {} parameters in {} tensors\n",
      printable(plan.description),
      short_count(plan.numel),
      plan.num_params);
  text += fmt::format("{} on {} rank(s)", answer.strategy, setup.world());
  if (setup.engine == plan::Engine::Sharded && setup.copies > 1) {
    text += fmt::format(
        ": {} copies, each over {} rank(s)", setup.copies, setup.shards);
  }
  text += "\n";
  text += memory_table(
      answer,
      setup.device == plan::Device::Cpu ? "memory per rank"
                                        : "device memory per rank",
      plan.device,
      style);
  if (plan.host.at_peak.total() > 0) {
    text += memory_table(answer, "host memory per rank", plan.host, style);
  }
  text += wire_table(plan.wire, style);
  if (setup.speeds.are_known()) {
    text += time_table(plan.time, style);
  }
  text += units_table(plan.units, style);
  if (answer.fit) {
    text += fit_text(answer, style);
  }
  text += words_text(plan, style);
  text += heading_line(style, "assumed");
  for (const std::string& note : answer.notes) {
    text += "  " + note + "\n";
  }
  return text;
}

} // namespace tessera::cli
