#include "fsdp/clipped_gradients.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "comm/group/group_impl.h"
#include "engine/module_units.h"
#include "engine/unit.h"

namespace tessera::fsdp {
namespace {

bool is_close(double a, double b) {
  if (std::isinf(a) || std::isinf(b)) {
    return a == b;
  }
  return a == b || (std::isnan(a) && std::isnan(b)) ||
      std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b));
}

std::string norm_text(double power, double p) {
  return power < 0
      ? std::string("none")
      : fmt::format("norm {}", std::isinf(p) ? power : std::pow(power, 1 / p));
}

} // namespace

std::vector<at::Tensor> ClippedGradients::defined() const {
  std::vector<at::Tensor> result;
  for (const auto& [group, gradients] : sharded) {
    result.insert(result.end(), gradients.begin(), gradients.end());
  }
  for (const PlainGradient& one : plain) {
    if (one.gradient.defined()) {
      result.push_back(one.gradient);
    }
  }
  return result;
}

ClippedGradients gradients_of(torch::nn::Module& module) {
  ClippedGradients result;
  std::unordered_set<const c10::TensorImpl*> seen; // units may have one leaf
  const auto note_device = [&](const at::Tensor& tensor) {
    if (result.device.is_cpu()) {
      result.device = tensor.device();
    }
  };
  for (const auto& param : engine::distinct_parameters(module)) {
    const engine::Unit* unit = engine::unit_of(param.tensor);
    if (unit == nullptr) {
      note_device(param.tensor);
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
    note_device(leaf);
    if (leaf.grad().defined() && leaf.grad().numel() > 0 &&
        seen.insert(leaf.unsafeGetTensorImpl()).second) {
      entry->gradients.push_back(leaf.grad());
    }
  }
  return result;
}

void refuse_differing(
    const std::vector<PlainGradient>& plain,
    const Group& group,
    const double* powers,
    double p) {
  for (size_t i = 0; i < plain.size(); ++i) {
    for (int rank = 1; rank < group.size(); ++rank) {
      const double theirs =
          powers[static_cast<size_t>(rank) * plain.size() + i];
      if (is_close(theirs, powers[i])) {
        continue;
      }
      raise<DisagreementError>(
          {.call = "clip_grad_norm_",
           .rank = group.rank(),
           .world_size = group.size(),
           .parameter = plain[i].name},
          fmt::format(
              "it is not sharded, and its gradient differs between the ranks: {} on rank 0, {} on rank {}. Each rank would scale its shards by another factor. Average it first, group.all_reduce(parameter.grad(), ReduceOp::Avg), or shard the parameter too.",
              norm_text(powers[i], p),
              norm_text(theirs, p),
              rank));
    }
  }
}

} // namespace tessera::fsdp
