// What a training step does to memory, in the order in which it does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::plan {

struct StepEvent {
  enum class Kind : uint8_t {
    Allocate, // activations: `bytes`
    Free, // the same
    Touch, // an operator reads parameters of `unit`
    Gradient, // of `param` in `unit` is made, or added to
    FinishUnit, // all gradients of `unit` are there
    Compute, // `flops`
  };
  Kind kind = Kind::Allocate;
  int64_t bytes = 0;
  size_t unit = 0;
  size_t param = 0;
  double flops = 0;
};

using StepEvents = std::vector<StepEvent>;

} // namespace tessera::plan
