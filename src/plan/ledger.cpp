#include "plan/ledger.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "plan/checked.h"

namespace tessera::plan {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::Shards:
      return "shards";
    case Kind::Full:
      return "full";
    case Kind::Gradients:
      return "gradients";
    case Kind::Optimizer:
      return "optimizer";
    case Kind::Activations:
      return "activations";
    case Kind::Buffers:
      return "buffers";
  }
  return "?";
}

int64_t Memory::total() const {
  return std::accumulate(by_kind.begin(), by_kind.end(), int64_t{0});
}

void Ledger::add(Kind kind, int64_t bytes) {
  total_ = plus(total_, bytes); // bounds the kinds too
  int64_t& mine = now_.by_kind[static_cast<size_t>(kind)];
  mine += bytes;
  int64_t& most = highest_.by_kind[static_cast<size_t>(kind)];
  most = std::max(most, mine);
  if (total_ > peak_total_) {
    peak_total_ = total_;
    peak_ = now_;
  }
}

void Ledger::drop(Kind kind, int64_t bytes) {
  int64_t& mine = now_.by_kind[static_cast<size_t>(kind)];
  if (bytes > mine) {
    throw std::logic_error("more is freed than there was");
  }
  mine -= bytes;
  total_ -= bytes;
}

void Ledger::reset_peak() {
  peak_total_ = total_;
  peak_ = now_;
  highest_ = now_;
}

} // namespace tessera::plan
