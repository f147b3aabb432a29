#include "fsdp/clip_on_device.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::fsdp {
namespace {

/// Norms of gradients, (count), to the power of `p`, or the norms themselves
/// where `p` is infinite.
at::Tensor powers_on(
    at::Device device,
    const std::vector<at::Tensor>& gradients,
    double p) {
  std::vector<at::Tensor> real;
  for (const at::Tensor& gradient : gradients) {
    real.push_back(gradient.is_complex() ? at::abs(gradient) : gradient);
  }
  std::vector<at::Tensor> norms;
  for (const at::Tensor& norm : at::_foreach_norm(real, p, at::kDouble)) {
    norms.push_back(norm.to(device, /*non_blocking=*/true));
  }
  const at::Tensor all = at::stack(norms);
  return std::isinf(p) ? all : all.pow(p);
}

/// The two sums that a norm knows. Both keep a NaN.
at::Tensor sum_of(const at::Tensor& powers, double p) {
  return std::isinf(p) ? powers.amax() : powers.sum();
}

at::Tensor added(const at::Tensor& a, const at::Tensor& b, double p) {
  return std::isinf(p) ? at::maximum(a, b) : a + b;
}

/// The powers of plain parameters, in their order: -1 where a parameter has no
/// gradient. All ranks get the same.
at::Tensor plain_powers(const ClippedGradients& gradients, double p) {
  std::vector<at::Tensor> some; // the gradients that have a norm
  for (const PlainGradient& one : gradients.plain) {
    if (one.gradient.defined() && one.gradient.numel() > 0) {
      some.push_back(one.gradient);
    }
  }
  const auto scalar = at::TensorOptions(gradients.device).dtype(at::kDouble);
  std::vector<at::Tensor> powers;
  if (!some.empty()) {
    powers = powers_on(gradients.device, some, p).unbind();
  }
  std::vector<at::Tensor> parts;
  auto power = powers.begin();
  for (const PlainGradient& one : gradients.plain) {
    parts.push_back(
        !one.gradient.defined()         ? at::full({}, -1.0, scalar)
            : one.gradient.numel() == 0 ? at::zeros({}, scalar)
                                        : *power++);
  }
  at::Tensor mine = at::stack(parts);
  const Group& all = gradients.all;
  if (all.valid() && all.size() > 1) {
    const auto count = static_cast<int64_t>(parts.size());
    const at::Tensor rows = at::empty({all.size(), count}, at::kDouble);
    all.all_gather_into(rows, mine.cpu(), "clip_grad_norm_");
    refuse_differing(gradients.plain, all, rows.const_data_ptr<double>(), p);
    // Rank 0's, so that ranks agree to the last bit.
    mine = rows.select(0, 0).to(gradients.device);
  }
  return mine;
}

/// The dtype of a factor that loses nothing by being rounded: the gradients'
/// own, for which there is one kernel for all of them, or float32.
at::ScalarType factor_dtype(at::ScalarType gradient) {
  const at::ScalarType real = c10::toRealValueType(gradient);
  return real == at::kDouble ? real : at::kFloat;
}

void multiply(const std::vector<at::Tensor>& gradients, const at::Tensor& by) {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>>
      alike;
  for (const at::Tensor& gradient : gradients) {
    alike[{gradient.scalar_type(), gradient.device().str()}].push_back(
        gradient);
  }
  for (const auto& [kind, some] : alike) {
    const at::Tensor& first = some.front();
    at::_foreach_mul_(
        some,
        by.to(
            first.device(),
            factor_dtype(first.scalar_type()),
            // The host reads a factor at once, so it must have arrived.
            /*non_blocking=*/!first.device().is_cpu()));
  }
}

} // namespace

at::Tensor clip_on_device(
    const ClippedGradients& gradients,
    double max_norm,
    double norm_type) {
  const at::Tensor nothing =
      at::zeros({}, at::TensorOptions(gradients.device).dtype(at::kDouble));
  at::Tensor total = nothing;
  if (!gradients.plain.empty()) {
    total =
        sum_of(plain_powers(gradients, norm_type).clamp_min(0.0), norm_type);
  }
  for (const auto& [group, some] : gradients.sharded) {
    const at::Tensor power =
        (some.empty()
             ? nothing
             : sum_of(powers_on(gradients.device, some, norm_type), norm_type))
            .view(1)
            .clone();
    group.all_reduce(
        power,
        std::isinf(norm_type) ? ReduceOp::Max : ReduceOp::Sum,
        "clip_grad_norm_");
    total = added(total, power.select(0, 0), norm_type);
  }
  const at::Tensor norm =
      std::isinf(norm_type) ? total : total.pow(1.0 / norm_type);
  multiply(gradients.defined(), (max_norm / (norm + 1e-6)).clamp_max(1.0));
  return norm;
}

} // namespace tessera::fsdp
