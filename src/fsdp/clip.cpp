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

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>
#include <vector>

#include "comm/group/group_impl.h"
#include "engine/module_units.h"
#include "engine/unit.h"

namespace tessera {
namespace {

/// The gradients of one group's shards.
struct GroupGradients {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// A parameter that every rank has whole.
struct Plain {
  std::string name;
  at::Tensor gradient; // may be undefined
};

struct Gradients {
  /// In the order in which the module's units name the groups, which is the
  /// same on all ranks.
  std::vector<GroupGradients> sharded;
  std::vector<Plain> plain;
  /// All ranks of the first unit; no group if nothing is sharded.
  Group all;
};

Gradients gradients_of(torch::nn::Module& module) {
  Gradients result;
  std::unordered_set<const c10::TensorImpl*> seen; // units may have one leaf
  for (const auto& param : engine::distinct_parameters(module)) {
    const engine::Unit* unit = engine::unit_of(param.tensor);
    if (unit == nullptr) {
      result.plain.push_back({param.name, param.tensor.grad()});
      continue;
    }
    if (!result.all.valid()) {
      result.all = unit->groups().all;
    }
    // Copies of the model have the same gradients: count one of them.
    const Group& group = unit->groups().shard;
    auto entry = std::find_if(
        result.sharded.begin(), result.sharded.end(), [&](const auto& other) {
          return &other.group.impl() == &group.impl();
        });
    if (entry == result.sharded.end()) { // also where this rank has no gradient
      entry = result.sharded.insert(result.sharded.end(), {group, {}});
    }
    const at::Tensor leaf =
        unit->params().leaf_of(param.tensor.unsafeGetTensorImpl());
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

/// Sum of |g|^p of a gradient, or its largest |g|, in double.
double power_of(const at::Tensor& gradient, double p) {
  if (gradient.numel() == 0) {
    return 0;
  }
  const at::Tensor real = gradient.is_complex() ? at::abs(gradient) : gradient;
  const double norm =
      at::linalg_vector_norm(real, p, std::nullopt, false, at::kDouble)
          .item<double>();
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

bool is_close(double a, double b) {
  if (std::isinf(a) || std::isinf(b)) {
    return a == b;
  }
  return a == b || (std::isnan(a) && std::isnan(b)) ||
      std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b));
}

/// Throws on all ranks unless they have the same gradients of a plain
/// parameter, as far as norms tell. `all` has a row for each rank.
void refuse_differing(
    const std::vector<Plain>& plain,
    const Group& group,
    const double* all,
    double p) {
  for (size_t i = 0; i < plain.size(); ++i) {
    for (int rank = 1; rank < group.size(); ++rank) {
      const double theirs = all[static_cast<size_t>(rank) * plain.size() + i];
      if (is_close(theirs, all[i])) {
        continue;
      }
      const auto text = [&](double power) {
        return power < 0
            ? std::string("none")
            : fmt::format(
                  "norm {}", std::isinf(p) ? power : std::pow(power, 1 / p));
      };
      raise<DisagreementError>(
          {.call = "clip_grad_norm_",
           .rank = group.rank(),
           .world_size = group.size(),
           .parameter = plain[i].name},
          fmt::format(
              "it is not sharded, and its gradient differs between the ranks: {} on rank 0, {} on rank {}. Each rank would scale its shards by another factor. Average it first, group.all_reduce(parameter.grad(), ReduceOp::Avg), or shard the parameter too.",
              text(all[i]),
              text(theirs),
              rank));
    }
  }
}

/// The norm's power over plain parameters, the same number on all ranks.
/// Collective if anything is sharded.
double plain_power(const Gradients& gradients, double p) {
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
    refuse_differing(plain, gradients.all, all.const_data_ptr<double>(), p);
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

} // namespace

double clip_grad_norm_(ModuleRef module, double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    raise<c10::ValueError>(
        {.call = "clip_grad_norm_"},
        fmt::format(
            "norm_type is {}; expected a positive number or infinity.",
            norm_type));
  }
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(norm_type);
  const Gradients all = gradients_of(module);
  double total = plain_power(all, norm_type);
  std::vector<at::Tensor> scaled;
  for (const auto& [group, gradients] : all.sharded) {
    auto power = at::full({1}, local_power(gradients, norm_type), at::kDouble);
    group.all_reduce(
        power, is_max ? ReduceOp::Max : ReduceOp::Sum, "clip_grad_norm_");
    total = add_power(total, power.item<double>(), norm_type);
    scaled.insert(scaled.end(), gradients.begin(), gradients.end());
  }
  for (const Plain& plain : all.plain) {
    if (plain.gradient.defined()) {
      scaled.push_back(plain.gradient);
    }
  }
  const double norm = is_max ? total : std::pow(total, 1.0 / norm_type);
  const double scale = max_norm / (norm + 1e-6);
  if (!(scale >= 1) && !scaled.empty()) {
    at::_foreach_mul_(scaled, scale); // a NaN too, as in Python
  }
  return norm;
}

} // namespace tessera
