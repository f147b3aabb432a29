// Who gets which samples of an epoch: arithmetic alone.
#pragma once

#include <tessera/data/sampler.h>

#include <cstdint>
#include <optional>

namespace tessera::data {

/// The ranks that divide an epoch, and how.
struct Division {
  int64_t size = 0; // of the epoch
  int64_t batch_size = 1; // per rank
  int num_ranks = 1;
  int rank = 0;
  EpochEnd end = EpochEnd::Pad;

  int64_t all_ranks() const {
    return batch_size * num_ranks;
  }
};

/// Places of the epoch for one rank. Places beyond the epoch belong to the next
/// epoch (Continue) or are counted from its beginning again (Pad).
struct Stretch {
  int64_t first = 0;
  int64_t rows = 0;
  Position next; // of all ranks, afterwards
};

/// The places of this rank's next batch; nothing at the end of the epoch.
std::optional<Stretch> stretch_at(const Division& division, Position position);

/// True if the batches at `samples` are the last of an epoch of Uneven, and
/// too few samples are left for some of the ranks to get one: these are told of
/// the end while the others get a batch. So that all are at the same position,
/// the epoch is over for the others with that batch.
bool leaves_ranks_without(const Division& division, int64_t samples);

/// Batches of this rank from `samples` to the end of the epoch. Not for
/// Continue.
int64_t batches_from(const Division& division, int64_t samples);

} // namespace tessera::data
