#include "train/unscale.h"

#include <tessera/error.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::train {
namespace {

/// What one call of the kernel can take.
struct SameKind {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> gradients;
};

/// The elements of a gradient as the kernel takes them.
at::Tensor elements_of(const at::Tensor& gradient) {
  const at::Tensor values =
      gradient.layout() == at::kStrided ? gradient : gradient._values();
  if (!values.is_complex()) {
    return values;
  }
  // A conjugated view has no view as reals; what it is a view of has the same
  // reals but for signs, which a factor leaves alone.
  return at::view_as_real(values.is_conj() ? values.conj() : values);
}

std::vector<SameKind> gradients_by_kind(
    const torch::optim::Optimizer& optimizer) {
  std::vector<SameKind> kinds;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const at::Tensor& gradient = param.grad();
      if (!gradient.defined() || gradient.numel() == 0) {
        continue;
      }
      at::Tensor elements = elements_of(gradient);
      auto found =
          std::find_if(kinds.begin(), kinds.end(), [&](const SameKind& kind) {
            return kind.device == elements.device() &&
                kind.dtype == elements.scalar_type();
          });
      if (found == kinds.end()) {
        found = kinds.insert(
            kinds.end(), {elements.device(), elements.scalar_type(), {}});
      }
      found->gradients.push_back(std::move(elements));
    }
  }
  return kinds;
}

} // namespace

void check_can_unscale(const torch::optim::Optimizer& optimizer) {
  const auto* zero = dynamic_cast<const ZeroRedundancyOptimizer*>(&optimizer);
  if (zero != nullptr && zero->steps_in_backward()) {
    raise<c10::ValueError>(
        {.call = "GradScaler"},
        "the ZeroRedundancyOptimizer was made with overlap_with_ddp, so backward steps before gradients can be unscaled. Make it without overlap_with_ddp.");
  }
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& params = groups[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      // By the parameter, whose dtype is its gradient's: other ranks may lack
      // the gradient.
      if (params[i].requires_grad() && params[i].scalar_type() == at::kHalf) {
        raise<c10::ValueError>(
            {.call = "GradScaler"},
            fmt::format(
                "parameter {} of param group {} is in float16, and so is its gradient, which would vanish when it is unscaled. Keep parameters in float32 and compute in float16: MixedPrecisionPolicy().param_dtype(torch::kHalf), or autocast.",
                i,
                group));
      }
    }
  }
}

at::Tensor unscale_gradients(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& scale) {
  const at::NoGradGuard no_grad;
  // As in Python: the reciprocal is rounded once.
  const at::Tensor inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor all = at::zeros({}, scale.options());
  for (const SameKind& kind : gradients_by_kind(optimizer)) {
    at::Tensor found = at::zeros({}, scale.options().device(kind.device));
    at::_amp_foreach_non_finite_check_and_unscale_(
        kind.gradients, found, inverse.to(kind.device));
    all = at::maximum(all, found.to(all.device()));
  }
  return all;
}

} // namespace tessera::train
