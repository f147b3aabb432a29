// The iteration that makes the update of a matrix orthogonal.
#pragma once

#include <tessera/optim/options.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::optim {

struct NewtonSchulz {
  NsCoefficients coefficients;
  int64_t num_steps = 0;
  double eps = 0; // the least norm to divide by

  /// `matrix` is of bfloat16, and is overwritten. The result has its shape, not
  /// its strides: a matrix with more rows than columns is worked on as its
  /// transpose. The same operators as in Python, so the same bits.
  at::Tensor operator()(const at::Tensor& matrix) const;
};

} // namespace tessera::optim
