#include "exported/regions.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "exported/graph_compiler.h"
#include "exported/node_text.h"
#include "exported/writes.h"

namespace tessera::exported {
namespace {

/// The steps of one call of a module: from `begin` up to `end`.
struct Region {
  std::string path;
  RecomputeOptions options;
  size_t begin = 0;
  size_t end = 0;
};

/// The frame of the outermost recomputed module that a step belongs to, from
/// the module `inside` inwards.
const ModuleFrame* chosen_frame(
    const Step& step,
    const RecomputedModules& modules) {
  if (step.node != nullptr) {
    for (const ModuleFrame& frame : step.node->modules) {
      if (modules.contains(frame.path)) {
        return &frame;
      }
    }
  }
  return nullptr;
}

bool has_place(const Step& step) {
  return step.node != nullptr && !step.node->modules.empty();
}

std::vector<Region> find_regions(
    const Code& code,
    const RecomputedModules& modules) {
  std::vector<Region> regions;
  std::map<std::pair<std::string, int64_t>, size_t> seen;
  const ModuleFrame* last = nullptr; // of the step before
  for (size_t i = 0; i < code.steps.size(); ++i) {
    const Step& step = *code.steps[i];
    const ModuleFrame* frame = chosen_frame(step, modules);
    if (frame == nullptr) {
      // A node without a place (a check of a size) does not end a call.
      last = has_place(step) ? nullptr : last;
      continue;
    }
    if (last != nullptr && last->path == frame->path &&
        last->call == frame->call) {
      regions.back().end = i + 1;
    } else if (!seen.emplace(std::pair(frame->path, frame->call), i).second) {
      throw RefusedRegion(fmt::format(
          "the nodes of module \"{}\" do not follow one another: others stand before the one {}",
          frame->path,
          describe_node(*step.node)));
    } else {
      regions.push_back({frame->path, modules.at(frame->path), i, i + 1});
    }
    last = frame;
  }
  return regions;
}

/// Slots that are read, and slots that are given.
class SlotUse {
 public:
  template <class Use>
  static void each_source(std::vector<Operand>& operands, const Use& use) {
    for (Operand& operand : operands) {
      if (operand.form < Operand::Form::Tensors) {
        use(operand.source);
      }
      for (Source& element : operand.elements) {
        use(element);
      }
    }
  }
  template <class Use>
  static void each_slot(std::vector<Result>& results, const Use& use) {
    for (Result& result : results) {
      for (int32_t& slot : result.slots) {
        if (slot != Result::kDropped) {
          use(slot);
        }
      }
    }
  }
};

/// Makes one step of the steps of a region.
class RegionMaker {
 public:
  RegionMaker(
      Code& code,
      const Region& region,
      const std::set<uint32_t>& changing)
      : code_(code),
        region_(region),
        changing_(changing),
        step_(std::make_unique<RecomputeStep>()) {}

  std::unique_ptr<RecomputeStep> make() {
    step_->path = region_.path;
    step_->options = region_.options;
    for (size_t i = region_.begin; i < region_.end; ++i) {
      take(std::move(code_.steps[i]));
    }
    add_outputs();
    const Writes writes = writes_of(step_->first);
    if (!writes.inputs.empty()) {
      throw RefusedRegion(fmt::format(
          "the nodes of module \"{}\" change a value in place that was made before them",
          region_.path));
    }
    if (!std::includes(
            changing_.begin(),
            changing_.end(),
            writes.weights.begin(),
            writes.weights.end())) {
      throw RefusedRegion(fmt::format(
          "the nodes of module \"{}\" change a parameter in place",
          region_.path));
    }
    for (const uint32_t weight : weights_named(step_->first)) {
      if (changing_.contains(weight)) {
        step_->changing_weights.push_back(weight);
      }
    }
    return std::move(step_);
  }

 private:
  Code& inner() {
    return step_->first;
  }

  void take(std::unique_ptr<Step> step) {
    SlotUse::each_source(
        step->operands, [&](Source& source) { take_source(source); });
    SlotUse::each_slot(step->results, [&](int32_t& slot) {
      const auto inside = static_cast<int32_t>(inner().num_slots++);
      made_.emplace_back(slot, inside);
      slots_[slot] = inside;
      slot = inside;
    });
    inner().steps.push_back(std::move(step));
  }

  void take_source(Source& source) {
    if (source.from == Source::From::Constant) {
      const auto [found, is_new] = constants_.try_emplace(
          source.index, static_cast<uint32_t>(inner().constants.size()));
      if (is_new) {
        inner().constants.push_back(code_.constants[source.index]);
      }
      source.index = found->second;
    } else if (source.from == Source::From::Slot) {
      const auto outside = static_cast<int32_t>(source.index);
      const auto [found, is_new] =
          slots_.try_emplace(outside, static_cast<int32_t>(inner().num_slots));
      if (is_new) { // lives in from before
        ++inner().num_slots;
        inner().inputs.push_back(found->second);
        step_->operands.push_back(
            {.form = Operand::Form::Value, .source = source, .elements = {}});
      }
      source.index = static_cast<uint32_t>(found->second);
    }
  }

  /// Values that later steps, or the results of the program, read.
  void add_outputs() {
    std::vector<bool> read(code_.num_slots);
    const auto mark = [&](Source& source) {
      if (source.from == Source::From::Slot) {
        read[source.index] = true;
      }
    };
    for (size_t i = region_.end; i < code_.steps.size(); ++i) {
      SlotUse::each_source(code_.steps[i]->operands, mark);
    }
    SlotUse::each_source(code_.outputs, mark);
    for (const auto& [outside, inside] : made_) {
      if (read[static_cast<size_t>(outside)]) {
        inner().outputs.push_back(
            {.form = Operand::Form::Value,
             .source = {Source::From::Slot, static_cast<uint32_t>(inside)},
             .elements = {}});
        step_->results.push_back({.is_list = false, .slots = {outside}});
      }
    }
  }

  Code& code_;
  const Region& region_;
  const std::set<uint32_t>& changing_;
  std::unique_ptr<RecomputeStep> step_;
  std::unordered_map<int32_t, int32_t> slots_; // outside to inside
  std::unordered_map<uint32_t, uint32_t> constants_;
  std::vector<std::pair<int32_t, int32_t>> made_; // outside, inside
};

/// Those strictly below a module.
RecomputedModules below(
    const RecomputedModules& modules,
    const std::string& path) {
  RecomputedModules result;
  for (const auto& [each, options] : modules) {
    if (each.starts_with(path + ".")) {
      result.emplace(each, options);
    }
  }
  return result;
}

} // namespace

void recompute_regions(
    Code& code,
    const RecomputedModules& modules,
    const std::set<uint32_t>& changing) {
  const std::vector<Region> regions = find_regions(code, modules);
  if (regions.empty()) {
    return;
  }
  unmark_last_uses(code);
  std::vector<std::unique_ptr<RecomputeStep>> made;
  for (const Region& region : regions) {
    made.push_back(RegionMaker(code, region, changing).make());
    mark_last_uses(made.back()->first);
    recompute_regions(
        made.back()->first, below(modules, region.path), changing);
  }
  std::vector<std::unique_ptr<Step>> steps;
  size_t next = 0;
  for (size_t i = 0; i < code.steps.size(); ++i) {
    if (next < regions.size() && i == regions[next].begin) {
      steps.push_back(std::move(made[next]));
      i = regions[next++].end - 1;
    } else {
      steps.push_back(std::move(code.steps[i]));
    }
  }
  code.steps = std::move(steps);
  mark_last_uses(code);
}

} // namespace tessera::exported
