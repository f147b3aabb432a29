// The largest run that fits into a rank's memory.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/plan.h"

namespace tessera::plan {

/// Memory of a rank's device that a run may use.
struct Limit {
  int64_t bytes = 0;
};

bool fits(const Subject& subject, const TrainingSetup& setup, Limit limit);

/// The largest number of sequences per rank, with everything else unchanged;
/// nothing if even one is too many.
std::optional<int64_t> largest_batch(
    const GptSubject& subject,
    const TrainingSetup& setup,
    Limit limit);

/// The same for a program whose batch is dynamic.
std::optional<int64_t> largest_batch(
    const ProgramSubject& subject,
    const TrainingSetup& setup,
    Limit limit);

enum class Grows {
  Layers,
  Width, // by whole heads of the same size
};
/// Nothing if even one layer, or one head, is too many.
std::optional<GptShape> largest_gpt(
    const GptSubject& subject,
    const TrainingSetup& setup,
    Limit limit,
    Grows grows);

/// The fewest ranks: in hybrid sharding with as many copies as `setup` has,
/// with ddp, zero and unsharded parameters the fewest copies. Nothing if no
/// number is enough.
std::optional<int64_t> smallest_world(
    const Subject& subject,
    const TrainingSetup& setup,
    Limit limit);

} // namespace tessera::plan
