#include "train/captured/step_cache.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

namespace tessera::train {
namespace {

/// Those without a graph, too: batches may have a new length in every call.
constexpr size_t kMostKinds = 64;
/// So many new kinds in a row are no accident.
constexpr int64_t kManyNewKinds = 10;

std::string what_changes(const StepKind::Part* changed) {
  if (changed == nullptr) {
    return "parameters, buffers or state of the optimizers have moved to other memory. Load values in place";
  }
  const StepKind::Part& part = *changed;
  if (part.is_option) {
    return fmt::format(
        "the option \"{}\" of a param group has changed. A graph keeps all options but the learning rate: leave the option as it is, as OneCycleLROptions().cycle_momentum(false) does",
        part.what);
  }
  if (std::string_view(part.what) == kShapesOfInputs) {
    return "the shape of an input has changed. Pad batches to a few shapes";
  }
  return fmt::format("{} has changed. Leave it as it is", part.what);
}

} // namespace

RecordedStep* KnownKind::current() const {
  const auto found =
      std::find_if(recorded.begin(), recorded.end(), [](const auto& step) {
        return step->holds();
      });
  return found == recorded.end() ? nullptr : found->get();
}

StepCache::StepCache(const CapturedStepOptions& options)
    : max_graphs_(options.max_graphs()) {}

KnownKind& StepCache::find(
    const StepKind& kind,
    int64_t call,
    uint64_t places,
    uint64_t epoch,
    bool warns) {
  if (places != places_) {
    kinds_.clear();
    places_ = places;
  }
  if (epoch != epoch_) { // attempts count all the same
    for (auto& [bytes, known] : kinds_) {
      known.recorded.clear();
    }
    epoch_ = epoch;
  }
  const auto [found, is_new] = kinds_.try_emplace(kind.bytes);
  KnownKind& known = found->second;
  known.last_call = call;
  std::erase_if(
      known.recorded, [](const auto& step) { return !step->lives(); });
  num_new_ = is_new ? num_new_ + 1 : 0;
  if (is_new) {
    if (warns) {
      note_new_kind(kind);
    }
    forget_oldest_kind(); // not this one, which is the newest
    last_new_ = kind;
  }
  return known;
}

void StepCache::note_new_kind(const StepKind& kind) {
  if (num_new_ >= kManyNewKinds && !has_warned_) {
    has_warned_ = true;
    TORCH_WARN(
        "CapturedStep runs every step eagerly, which is slower: it captures a kind of step when it meets it again, and each of the last ",
        kManyNewKinds,
        " calls was of a new kind, since ",
        what_changes(kind.first_difference(last_new_)),
        ", or run the steps without CapturedStep.");
  }
}

void StepCache::forget_oldest_kind() {
  if (kinds_.size() <= kMostKinds + static_cast<size_t>(max_graphs_)) {
    return;
  }
  auto oldest = kinds_.end();
  for (auto entry = kinds_.begin(); entry != kinds_.end(); ++entry) {
    const bool is_older = oldest == kinds_.end() ||
        entry->second.last_call < oldest->second.last_call;
    if (entry->second.recorded.empty() && is_older) {
      oldest = entry;
    }
  }
  kinds_.erase(oldest); // there is one: only max_graphs_ have a graph
}

RecordedStep& StepCache::keep(
    KnownKind& kind,
    std::unique_ptr<RecordedStep> recorded,
    const RecordedStep* old) {
  std::erase_if(
      kind.recorded, [old](const auto& step) { return step.get() == old; });
  kind.recorded.push_back(std::move(recorded));
  RecordedStep& kept = *kind.recorded.back();
  forget_oldest_graph();
  note_capture();
  return kept;
}

void StepCache::forget_oldest_graph() {
  if (num_graphs() <= static_cast<size_t>(max_graphs_)) {
    return;
  }
  KnownKind* oldest_of = nullptr;
  size_t oldest = 0;
  int64_t last_use = std::numeric_limits<int64_t>::max();
  for (auto& [bytes, kind] : kinds_) {
    for (size_t i = 0; i < kind.recorded.size(); ++i) {
      if (kind.recorded[i]->last_use < last_use) {
        last_use = kind.recorded[i]->last_use;
        oldest_of = &kind;
        oldest = i;
      }
    }
  }
  oldest_of->recorded.erase(
      oldest_of->recorded.begin() + static_cast<std::ptrdiff_t>(oldest));
}

void StepCache::note_capture() {
  constexpr int64_t kMany = 4; // for each graph that may be kept
  if (++num_captures_ == kMany * max_graphs_) {
    TORCH_WARN(
        "CapturedStep has captured ",
        num_captures_,
        " steps and keeps ",
        max_graphs_,
        ": capturing takes longer than an eager step. Pad batches to a few shapes, or raise max_graphs.");
  }
}

size_t StepCache::num_graphs() const {
  size_t sum = 0;
  for (const auto& [bytes, kind] : kinds_) {
    sum += kind.recorded.size();
  }
  return sum;
}

} // namespace tessera::train
