#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "fsdp/clip_on_device.h"
#include "fsdp/clipped_gradients.h"

namespace tessera {
namespace {

using fsdp::ClippedGradients;

/// std::max would lose a NaN.
double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// The value of a scalar in double on the CPU, read without an operator.
double value_of(const at::Tensor& scalar) {
  return *scalar.const_data_ptr<double>();
}

/// Sum of |g|^p of a gradient, or its largest |g|, in double.
double power_of(const at::Tensor& gradient, double p) {
  if (gradient.numel() == 0) {
    return 0;
  }
  const at::Tensor real = gradient.is_complex() ? at::abs(gradient) : gradient;
  const double norm = value_of(
      at::linalg_vector_norm(real, p, std::nullopt, false, at::kDouble));
  return std::isinf(p) ? norm : std::pow(norm, p);
}

double add_power(double total, double power, double p) {
  return std::isinf(p) ? larger(total, power) : total + power;
}

double local_power(const std::vector<at::Tensor>& gradients, double p) {
  double total = 0;
  for (const at::Tensor& gradient : gradients) {
    total = add_power(total, power_of(gradient, p), p);
  }
  return total;
}

/// The norm's power over plain parameters, the same number on all ranks.
/// Collective if anything is sharded.
double plain_power(const ClippedGradients& gradients, double p) {
  const auto& plain = gradients.plain;
  const auto count = static_cast<int64_t>(plain.size());
  at::Tensor powers = at::empty({count}, at::kDouble);
  for (size_t i = 0; i < plain.size(); ++i) {
    // An undefined gradient differs from a gradient of zeros.
    powers.mutable_data_ptr<double>()[i] =
        plain[i].gradient.defined() ? power_of(plain[i].gradient, p) : -1;
  }
  if (count > 0 && gradients.all.valid() && gradients.all.size() > 1) {
    const at::Tensor all =
        at::empty({gradients.all.size(), count}, at::kDouble);
    gradients.all.all_gather_into(all, powers, "clip_grad_norm_");
    fsdp::refuse_differing(
        plain, gradients.all, all.const_data_ptr<double>(), p);
    // Rank 0's, so that ranks agree to the last bit.
    powers = all.select(0, 0).contiguous();
  }
  double total = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double power = powers.const_data_ptr<double>()[i];
    total = power == -1 ? total : add_power(total, power, p);
  }
  return total;
}

double clip_on_host(
    const ClippedGradients& all,
    double max_norm,
    double norm_type) {
  const bool is_max = std::isinf(norm_type);
  double total = plain_power(all, norm_type);
  for (const auto& [group, gradients] : all.sharded) {
    auto power = at::full({1}, local_power(gradients, norm_type), at::kDouble);
    group.all_reduce(
        power, is_max ? ReduceOp::Max : ReduceOp::Sum, "clip_grad_norm_");
    total = add_power(total, value_of(power), norm_type);
  }
  const double norm = is_max ? total : std::pow(total, 1.0 / norm_type);
  const double scale = max_norm / (norm + 1e-6);
  const std::vector<at::Tensor> scaled = all.defined();
  if (!(scale >= 1) && !scaled.empty()) {
    at::_foreach_mul_(scaled, scale); // a NaN too, as in Python
  }
  return norm;
}

} // namespace

at::Tensor clip_grad_norm_(
    ModuleRef module,
    double max_norm,
    double norm_type) {
  if (!(norm_type > 0)) {
    raise<c10::ValueError>(
        {.call = "clip_grad_norm_"},
        fmt::format(
            "norm_type is {}; expected a positive number or infinity.",
            norm_type));
  }
  at::NoGradGuard no_grad;
  const ClippedGradients gradients = fsdp::gradients_of(module);
  if (gradients.device.is_cpu()) {
    return at::full(
        {}, clip_on_host(gradients, max_norm, norm_type), at::kDouble);
  }
  return fsdp::clip_on_device(gradients, max_norm, norm_type);
}

} // namespace tessera
