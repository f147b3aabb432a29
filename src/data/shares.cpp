#include "data/shares.h"

#include <algorithm>

namespace tessera::data {

std::optional<Stretch> stretch_at(const Division& division, Position position) {
  const int64_t taken = position.samples;
  const int64_t left = division.size - taken;
  const int64_t all = division.all_ranks();
  if (left >= all) {
    return Stretch{
        taken + division.rank * division.batch_size,
        division.batch_size,
        {position.epoch, taken + all}};
  }
  const Position at_end{position.epoch, division.size};
  switch (division.end) {
    case EpochEnd::Drop:
      return std::nullopt;
    case EpochEnd::Pad: {
      const int64_t rows = (left + division.num_ranks - 1) / division.num_ranks;
      if (rows == 0) {
        return std::nullopt;
      }
      return Stretch{taken + division.rank * rows, rows, at_end};
    }
    case EpochEnd::Uneven: {
      const int64_t least = left / division.num_ranks;
      const int64_t num_larger = left % division.num_ranks;
      const int64_t rows = least + (division.rank < num_larger ? 1 : 0);
      if (rows == 0) {
        return std::nullopt;
      }
      const int64_t first = taken + division.rank * least +
          std::min<int64_t>(division.rank, num_larger);
      return Stretch{first, rows, at_end};
    }
    case EpochEnd::Continue: {
      const int64_t end = taken + all;
      return Stretch{
          taken + division.rank * division.batch_size,
          division.batch_size,
          {position.epoch + end / division.size, end % division.size}};
    }
  }
  return std::nullopt;
}

bool leaves_ranks_without(const Division& division, int64_t samples) {
  const int64_t left = division.size - samples;
  return division.end == EpochEnd::Uneven && left > 0 &&
      left < division.num_ranks;
}

int64_t batches_from(const Division& division, int64_t samples) {
  const int64_t left = division.size - samples;
  const int64_t full = left / division.all_ranks();
  const Position last{0, samples + full * division.all_ranks()};
  return full + (stretch_at(division, last) ? 1 : 0);
}

} // namespace tessera::data
