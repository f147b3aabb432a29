#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include "parallel.h"
#include "settings.h"

namespace gpt {

/// How many windows an evaluation takes: --eval-windows, or as many as do not
/// overlap.
int64_t num_evaluated(
    const tessera::data::TokenFile& tokens,
    const Settings& settings);

/// The fewest of so many windows that a rank computes at once: those of the
/// last rank at the end. A rank for which none is left computes one again.
int64_t fewest_rows(int64_t windows, const Settings& settings, int num_ranks);

/// The loss on text that is not trained on: the mean over --eval-windows
/// windows that are spread over the text.
class Evaluation {
 public:
  /// Collective.
  Evaluation(
      const Settings& settings,
      const tessera::Group& world,
      const tessera::data::TokenFile& tokens,
      Parallel& parallel,
      torch::Device device);

  /// The same on any number of ranks, but for rounding. Collective.
  double loss();

 private:
  Parallel& parallel_;
  tessera::data::Loader<tessera::data::TokenWindows> windows_;
};

} // namespace gpt
