#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "comm/group_impl.h"
#include "fsdp/module_units.h"
#include "shard/unit.h"

namespace tessera {
namespace {

/// The gradients of one group's shards, or, without a group, of unsharded
/// parameters, which every rank has whole.
struct GroupGradients {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// In the order in which the module comes to the groups: the same on all ranks.
std::vector<GroupGradients> gradients_of(torch::nn::Module& module) {
  std::vector<GroupGradients> result;
  std::unordered_set<const c10::TensorImpl*> seen; // units may have one leaf
  for (const auto& param : fsdp::distinct_parameters(module)) {
    const shard::Unit* unit = shard::unit_of(param.tensor);
    // Copies of the model have the same gradients: count one of them.
    const Group group = unit == nullptr ? Group() : unit->groups().shard;
    auto entry =
        std::find_if(result.begin(), result.end(), [&](const auto& other) {
          return other.group.valid() == group.valid() &&
              (!group.valid() || &other.group.impl() == &group.impl());
        });
    if (entry == result.end()) { // also where this rank has no gradient
      entry = result.insert(result.end(), {group, {}});
    }
    const at::Tensor leaf = unit == nullptr
        ? param.tensor
        : unit->leaf_of(param.tensor.unsafeGetTensorImpl());
    if (leaf.grad().defined() && leaf.grad().numel() > 0 &&
        seen.insert(leaf.unsafeGetTensorImpl()).second) {
      entry->gradients.push_back(leaf.grad());
    }
  }
  return result;
}

/// std::max would lose a NaN.
double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// Sum of |g|^p of the gradients, or their largest |g|, in double.
double local_power(const std::vector<at::Tensor>& gradients, double p) {
  const bool is_max = std::isinf(p);
  double total = 0;
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor real =
        gradient.is_complex() ? at::abs(gradient) : gradient;
    const double norm =
        at::linalg_vector_norm(real, p, std::nullopt, false, at::kDouble)
            .item<double>();
    total = is_max ? larger(total, norm) : total + std::pow(norm, p);
  }
  return total;
}

} // namespace

double clip_grad_norm_(
    torch::nn::Module& module,
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
  const bool is_max = std::isinf(norm_type);
  double total = 0;
  auto by_group = gradients_of(module);
  for (auto& [group, gradients] : by_group) {
    auto power = at::full({1}, local_power(gradients, norm_type), at::kDouble);
    if (group.valid()) {
      group.all_reduce(
          power, is_max ? ReduceOp::Max : ReduceOp::Sum, "clip_grad_norm_");
    }
    const double part = power.item<double>();
    total = is_max ? larger(total, part) : total + part;
  }
  const double norm = is_max ? total : std::pow(total, 1.0 / norm_type);
  const double scale = max_norm / (norm + 1e-6);
  if (!(scale >= 1)) { // a NaN goes into the gradients, as in Python
    for (auto& [group, gradients] : by_group) {
      if (!gradients.empty()) {
        at::_foreach_mul_(gradients, scale);
      }
    }
  }
  return norm;
}

} // namespace tessera
