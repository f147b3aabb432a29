#include "optim/newton_schulz.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

namespace tessera::optim {

at::Tensor NewtonSchulz::operator()(const at::Tensor& matrix) const {
  const auto [a, b, c] = coefficients;
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = is_tall ? matrix.t() : matrix;
  x.div_(at::clamp(at::linalg_vector_norm(x, 2), eps));
  for (int64_t step = 0; step < num_steps; ++step) {
    // x becomes a x + (b G + c G^2) x, where G = x x^T.
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, b, c);
    x = at::addmm(x, polynomial, x, a);
  }
  return is_tall ? x.t() : x;
}

} // namespace tessera::optim
