#include <tessera/comm/agree.h>
#include <tessera/error.h>
#include <tessera/optim/muon.h>

#include <ATen/ops/lerp.h>
#include <ATen/ops/zeros_like.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"
#include "comm/raw_access.h"
#include "optim/matrix_exchange.h"
#include "optim/newton_schulz.h"
#include "optim/option_fields.h"
#include "optim/shard_origin.h"

namespace tessera::optim {
namespace {

constexpr StateField kMuonMomentum{
    "momentum_buffer",
    StateField::Kind::LikeParam};

constexpr const char* kOriginal = "original";
constexpr const char* kMatchRmsAdamW = "match_rms_adamw";
constexpr int64_t kMaxNsSteps = 100;

NewtonSchulz iteration_of(const MuonOptions& options) {
  return {options.ns_coefficients(), options.ns_steps(), options.eps()};
}

/// What is made orthogonal; may be the buffer itself.
at::Tensor advance_momentum(
    const MuonOptions& options,
    const at::Tensor& gradient,
    const at::Tensor& buffer) {
  buffer.lerp_(gradient, 1 - options.momentum());
  return options.nesterov() ? at::lerp(gradient, buffer, options.momentum())
                            : buffer;
}

double adjusted_lr(const MuonOptions& options, at::IntArrayRef whole_shape) {
  const auto rows = static_cast<double>(whole_shape[0]);
  const auto columns = static_cast<double>(whole_shape[1]);
  const double ratio = options.adjust_lr_fn() == kMatchRmsAdamW
      ? 0.2 * std::sqrt(std::max(rows, columns))
      : std::sqrt(std::max(1.0, rows / columns));
  return options.lr() * ratio;
}

/// `direction` has the shape of `param`, which is a matrix of `whole_shape` or
/// a part of one.
void move(
    const MuonOptions& options,
    const at::Tensor& param,
    const at::Tensor& direction,
    at::IntArrayRef whole_shape) {
  param.mul_(1 - options.lr() * options.weight_decay());
  param.add_(direction, -adjusted_lr(options, whole_shape));
}

std::string line_of(const MuonOptions& options, size_t group) {
  const auto [a, b, c] = options.ns_coefficients();
  return fmt::format(
      "param group {}: lr {}, weight_decay {}, momentum {}, nesterov {}, ns_coefficients {} {} {}, eps {}, ns_steps {}, adjust_lr_fn {}",
      group,
      options.lr(),
      options.weight_decay(),
      options.momentum(),
      options.nesterov(),
      a,
      b,
      c,
      options.eps(),
      options.ns_steps(),
      options.adjust_lr_fn().value_or("None"));
}

} // namespace

MuonOptions::MuonOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> MuonOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"momentum", momentum_, OptionRange::NotNegative},
      {"nesterov", nesterov_},
      {"ns_coefficients", ns_coefficients_},
      {"eps", eps_},
      {"ns_steps", ns_steps_},
      {"adjust_lr_fn", adjust_lr_fn_}};
}

std::optional<std::string> MuonOptions::objection() const {
  if (ns_steps() < 0 || ns_steps() >= kMaxNsSteps) {
    return fmt::format(
        "ns_steps is {}, must be 0 or more and below {}.",
        ns_steps(),
        kMaxNsSteps);
  }
  const auto& name = adjust_lr_fn();
  if (name && *name != kOriginal && *name != kMatchRmsAdamW) {
    return fmt::format(
        "adjust_lr_fn is \"{}\", must be \"{}\" or \"{}\", or not be set.",
        *name,
        kOriginal,
        kMatchRmsAdamW);
  }
  return std::nullopt;
}

/// Matrices with gradients that one group of ranks shares, on one device.
struct Muon::Shared {
  struct Matrix {
    at::Tensor param; // this rank's part
    const MuonOptions* options = nullptr;
    ShardOrigin origin;
  };
  Group group;
  at::Device device;
  std::vector<Matrix> matrices;
  std::vector<std::string> lines; // what the ranks compare
  std::optional<size_t> last_group; // whose options are among the lines
};

Muon::Muon(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    MuonOptions defaults)
    : Optimizer(
          "Muon",
          param_groups,
          std::make_unique<MuonOptions>(std::move(defaults))) {
  for (const auto& group : param_groups_) {
    check_params(group);
  }
}

Muon::Muon(std::vector<at::Tensor> params, MuonOptions defaults)
    : Muon(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  check_params(group);
  Optimizer::add_param_group(group);
}

void Muon::set_batch_bytes(int64_t bytes) {
  if (bytes <= 0) {
    raise<c10::ValueError>(
        {.call = "Muon::set_batch_bytes"},
        fmt::format("a batch of {} bytes holds nothing. Pass more.", bytes));
  }
  batch_bytes_ = bytes;
}

void Muon::check_params(const torch::optim::OptimizerParamGroup& group) const {
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& param = group.params()[i];
    if (const auto unit = unit_of_flat_shard(param)) {
      raise<c10::ValueError>(
          {.call = name(), .unit = *unit},
          "without use_orig_params the unit has one flat parameter, in which Muon cannot see matrices. Use use_orig_params(true), or fully_shard.");
    }
    const auto origin = find_origin(param);
    const std::string label = origin ? origin->name : std::to_string(i);
    const ErrorSite site{.call = name(), .parameter = label};
    const at::IntArrayRef sizes =
        origin ? at::IntArrayRef(origin->cut.shape) : param.sizes();
    if (sizes.size() != 2) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "its shape is [{}], and Muon takes matrices only. Give it to AdamW; optim::muon_with_adamw(model, ...) divides the parameters of a model.",
              fmt::join(sizes, ", ")));
    }
    if (param.is_complex()) {
      raise<c10::ValueError>(
          site,
          "it is complex, which Muon does not support. Give it to AdamW.");
    }
  }
}

void Muon::update(const Options& base, Batch& batch) {
  const auto& options = static_cast<const MuonOptions&>(base);
  const auto buffers = batch.state(kMuonMomentum);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& param = batch.params[i];
    const at::Tensor direction = iteration_of(options)(
        advance_momentum(options, batch.gradients[i], buffers[i])
            .to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true));
    move(options, param, direction, param.sizes());
  }
}

void Muon::initialize(const Options& /*options*/, Batch& batch) {
  batch.state(kMuonMomentum);
}

std::vector<StateField> Muon::state_fields() const {
  return {kMuonMomentum};
}

bool Muon::is_stepped_together(const at::Tensor& param) const {
  const auto origin = find_origin(param);
  return origin && origin->group.size() > 1;
}

void Muon::check_step(const std::function<void()>& checks) {
  std::vector<Group> groups;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const auto origin = find_origin(param);
      const bool is_new = origin && origin->group.size() > 1 &&
          std::none_of(groups.begin(), groups.end(), [&](const Group& one) {
                            return &one.impl() == &origin->group.impl();
                          });
      if (is_new) {
        groups.push_back(origin->group);
      }
    }
  }
  comm::all_or_none(groups, "Muon::step", [&] {
    for (const auto& group : param_groups_) {
      check_params(group); // LibTorch's add_param_group() does not check
    }
    checks();
  });
}

void Muon::step_together() {
  std::vector<Shared> all = find_shared();
  for (const Shared& shared : all) {
    agree(shared.group, "Muon::step", shared.lines);
  }
  // Where a write is refused, it is refused before anything changes. A rank
  // with nothing to write reports the write too; see [Note: raw access].
  for (const Shared& shared : all) {
    for (const Shared::Matrix& matrix : shared.matrices) {
      comm::before_raw_write(matrix.param, name().c_str());
    }
  }
  for (Shared& shared : all) {
    try {
      step_shared(shared);
    } catch (...) {
      // The other ranks wait for parts of matrices that will not come.
      shared.group.impl().give_up(
          "Muon::step threw; see that rank's own error");
      throw;
    }
  }
}

std::vector<Muon::Shared> Muon::find_shared() {
  std::vector<Shared> all;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& options = static_cast<const MuonOptions&>(options_of(i));
    for (const at::Tensor& param : param_groups_[i].params()) {
      auto origin = find_origin(param);
      if (!origin || origin->group.size() == 1) {
        continue;
      }
      auto shared = std::find_if(all.begin(), all.end(), [&](const auto& one) {
        return &one.group.impl() == &origin->group.impl() &&
            one.device == param.device();
      });
      if (shared == all.end()) {
        all.push_back({origin->group, param.device(), {}, {}, {}});
        shared = all.end() - 1;
        shared->lines.push_back(fmt::format("batch_bytes {}", batch_bytes_));
      }
      if (shared->last_group != i) {
        shared->last_group = i;
        shared->lines.push_back(line_of(options, i));
      }
      const bool has_gradient = param.grad().defined();
      shared->lines.push_back(fmt::format(
          "parameter \"{}\" of shape [{}], {} gradient",
          origin->name,
          fmt::join(origin->cut.shape, ", "),
          has_gradient ? "a" : "no"));
      const bool is_empty =
          origin->cut.shape[0] == 0 || origin->cut.shape[1] == 0;
      if (has_gradient && !is_empty) {
        shared->matrices.push_back({param, &options, std::move(*origin)});
      }
    }
  }
  return all;
}

void Muon::step_shared(Shared& shared) {
  std::vector<CutMatrix> matrices;
  for (const Shared::Matrix& matrix : shared.matrices) {
    matrices.push_back({matrix.origin.cut, iteration_of(*matrix.options)});
  }
  MatrixExchange(shared.group, shared.device, std::move(matrices), batch_bytes_)
      .run(
          [&](size_t index, const at::Tensor& to) {
            const auto& [param, options, origin] = shared.matrices[index];
            if (to.numel() != 0) {
              to.copy_(
                  advance_momentum(*options, param.grad(), momentum_of(param))
                      .reshape({-1}));
            }
          },
          [&](size_t index, const at::Tensor& from) {
            const auto& [param, options, origin] = shared.matrices[index];
            if (from.numel() != 0) {
              move(*options, param, from.view(param.sizes()), origin.cut.shape);
            }
          });
}

/// Zeros at first. Loading checks its shape.
at::Tensor Muon::momentum_of(const at::Tensor& param) {
  StateValue& value = state_of(param)[kMuonMomentum.name];
  if (value.is_none()) {
    value = at::zeros_like(param);
  }
  return value.tensor();
}

} // namespace tessera::optim
