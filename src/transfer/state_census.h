// What all ranks together have of an optimizer's state, in a few numbers for
// each parameter.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::transfer {

/// [Note: census]
///
/// Ranks that have elements of a parameter nearly always describe its state
/// alike, and most parameters of an optimizer alike. So ranks do not send each
/// other their descriptions. They send numbers, of which every rank needs only
/// the sum or the largest over all ranks: how many elements have state, how
/// many ranks, a digest of the description, and who describes first. Then each
/// description that occurs travels once, from the first rank that has it to
/// all. The bytes that a rank sends and holds depend on the number of
/// parameters and of different descriptions, not on the number of ranks.
///
/// Use: count() on each rank for what it has, exchange(), then read. The
/// parameters have the same numbers on all ranks.
class StateCensus {
 public:
  StateCensus(size_t num_params, int rank);

  /// This rank has state for a parameter, and `elements` of it. If the state
  /// `counts`, its description must be the same on all ranks where it counts.
  void count(size_t param, int64_t elements, bool counts, Bytes description);
  /// Adds what the ranks of the group counted. Collective.
  void exchange(const Group& group);

  /// What the ranks together have of one parameter.
  struct Found {
    int64_t ranks = 0; // that have state
    int64_t elements = 0; // they have
    bool counts = false; // the state of any rank counts
    bool is_one = false; // where it counts, it has one description
  };
  Found find(size_t param) const;
  /// The description of state that counts and has one.
  const Bytes& description(size_t param) const;

  /// Bytes of the numbers, and of the descriptions that travel.
  size_t wire_bytes() const;

 private:
  /// A description that occurs.
  struct Described {
    size_t param; // the first that has it
    int sender; // the first rank that has it for that parameter
    Bytes bytes;
  };

  void lay_out_descriptions();
  void share_descriptions(const Group& group);

  const size_t num_params_;
  const int rank_;
  std::vector<Bytes> own_; // by parameter: what counts on this rank
  at::Tensor largest_; // (parameters, 4), see the source
  at::Tensor sums_; // (parameters, 2)
  std::vector<Described> described_;
  std::vector<size_t> at_; // by parameter: its description in described_
};

} // namespace tessera::transfer
