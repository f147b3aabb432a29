#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include "parallel.h"
#include "settings.h"

namespace gpt {

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
