#include "plan/fit.h"

#include <algorithm>
#include <functional>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// Numbers of ranks that are tried one by one where more ranks may need more
/// memory.
constexpr int64_t kTriedOneByOne = 512;

/// The largest number from 1 to `most` that has a property which no number
/// above it has.
std::optional<int64_t> largest(
    int64_t most,
    const std::function<bool(int64_t)>& is_good) {
  if (!is_good(1)) {
    return std::nullopt;
  }
  int64_t good = 1;
  int64_t bad = 2;
  for (; bad <= most && is_good(bad); bad *= 2) {
    good = bad;
  }
  bad = std::min(bad, most + 1);
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (is_good(middle) ? good : bad) = middle;
  }
  return good;
}

} // namespace

bool fits(const Subject& subject, const TrainingSetup& setup, Limit limit) {
  try {
    const Plan plan = make_plan(subject, setup);
    return plan.device.at_peak.total() <= limit.bytes;
  } catch (const TooLarge&) {
    return false;
  }
}

std::optional<int64_t> largest_batch(
    const GptSubject& subject,
    const TrainingSetup& setup,
    Limit limit) {
  return largest(kMostOfASize, [&](int64_t batch) {
    GptSubject other = subject;
    other.run.batch = batch;
    return fits(other, setup, limit);
  });
}

std::optional<int64_t> largest_batch(
    const ProgramSubject& subject,
    const TrainingSetup& setup,
    Limit limit) {
  const auto range = batch_range(*subject.run.program);
  return largest(range.most, [&](int64_t batch) {
    ProgramSubject other = subject;
    other.run.sizes.batch = std::max(batch, range.least);
    return fits(other, setup, limit);
  });
}

std::optional<GptShape> largest_gpt(
    const GptSubject& subject,
    const TrainingSetup& setup,
    Limit limit,
    Grows grows) {
  check(subject.shape);
  const int64_t head_size = subject.shape.width / subject.shape.heads;
  const auto grown = [&](int64_t size) {
    GptSubject other = subject;
    if (grows == Grows::Layers) {
      other.shape.layers = size;
    } else {
      other.shape.heads = size;
      other.shape.width = times(size, head_size);
    }
    return other;
  };
  const int64_t most =
      grows == Grows::Layers ? kMostLayers : kMostOfASize / head_size;
  const auto size = largest(most, [&](int64_t candidate) {
    return fits(grown(candidate), setup, limit);
  });
  return size ? std::optional(grown(*size).shape) : std::nullopt;
}

std::optional<int64_t> smallest_world(
    const Subject& subject,
    const TrainingSetup& setup,
    Limit limit) {
  const bool has_copies_only =
      setup.engine != Engine::Sharded || setup.is_whole;
  const auto fits_on = [&](int64_t ranks) {
    TrainingSetup other = setup;
    (has_copies_only ? other.copies : other.shards) = ranks;
    return fits(subject, other, limit);
  };
  const int64_t groups = has_copies_only ? 1 : setup.copies;
  const int64_t most = kMostRanks / groups;
  // Shards by rows are padded to whole rows: more ranks may need more memory.
  const bool is_monotone = setup.layout == engine::Layout::Kind::Flat;
  const int64_t tried_all = is_monotone ? 1 : std::min(most, kTriedOneByOne);
  for (int64_t ranks = 1; ranks <= tried_all; ++ranks) {
    if (fits_on(ranks)) {
      return ranks * groups;
    }
  }
  const bool is_enough = fits(subject, setup, limit);
  const int64_t given = has_copies_only ? setup.copies : setup.shards;
  int64_t good = 2;
  while (good <= tried_all) {
    good *= 2;
  }
  while (good <= most && !fits_on(good)) {
    good *= 2;
  }
  if (good > most) {
    return is_enough ? std::optional(given * groups) : std::nullopt;
  }
  int64_t bad = good / 2;
  while (good - bad > 1) {
    const int64_t middle = bad + (good - bad) / 2;
    (fits_on(middle) ? good : bad) = middle;
  }
  return (is_enough ? std::min(good, given) : good) * groups;
}

} // namespace tessera::plan
