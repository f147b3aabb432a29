#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/train/grad_scaler.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/module_units.h"
#include "libtorch/recording.h"
#include "train/scaled_optimizers.h"
#include "train/scaler_options.h"
#include "train/unscale.h"

namespace tessera {
namespace {

constexpr const char* kLoad = "GradScaler::load_state_dict";

/// True if clip_grad_norm_(model) gives all ranks of `group` one norm, which
/// all of them computed together.
bool shares_norm(const torch::nn::Module& model, const Group& group) {
  const auto units = engine::units_in(model);
  return !units.empty() &&
      std::all_of(units.begin(), units.end(), [&](const auto& unit) {
        return unit->groups().shard.global_ranks() == group.global_ranks();
      });
}

} // namespace

struct GradScaler::Impl {
  GradScalerOptions options; // init_scale: the scale, until there is a tensor
  int64_t init_tracker = 0; // likewise
  /// Undefined until the first loss.
  at::Tensor scale; // float32 scalar
  at::Tensor tracker; // int32 scalar: steps in a row that were finite
  train::ScaledOptimizers optimizers; // since the last update()
  at::Tensor last_found_inf; // of the last update()
  bool compares_settings = true; // at the next agreement

  /// What a dictionary says.
  struct Loaded {
    GradScalerOptions options;
    int64_t tracker = 0;
  };

  at::Tensor apply(const at::Tensor& output);
  void check_has_scale(const char* call) const;
  std::optional<Group> peers() const;
  void compare_settings(const Group& group);
  void agree_on_found_inf();
  void set(GradScalerOptions changed, const char* call);
  Loaded read(const StateDict& state) const;
  void take_part_in_recording();
};

/// In a replay the scale changes on the device alone.
void GradScaler::Impl::take_part_in_recording() {
  libtorch::take_part_in_recording(
      {.owner = this,
       .objection = [this]() -> std::string {
         if (!scale.defined()) {
           return "the GradScaler has no scale yet, and each replay would create it again. Run an eager step first.";
         }
         return optimizers.empty()
             ? ""
             : "gradients were unscaled before the step. Call unscale_() and update() in the step.";
       },
       .settings =
           [this] {
             return fmt::format(
                 "{} {} {} {}",
                 options.growth_factor(),
                 options.backoff_factor(),
                 options.growth_interval(),
                 compares_settings);
           },
       .forget =
           [this, found_inf = last_found_inf] {
             optimizers.clear();
             last_found_inf = found_inf;
           },
       .finish =
           [this] {
             return [this, found_inf = last_found_inf] {
               last_found_inf = found_inf;
             };
           }});
}

at::Tensor GradScaler::Impl::apply(const at::Tensor& output) {
  take_part_in_recording();
  if (!scale.defined()) {
    const auto device = at::TensorOptions(output.device());
    scale = at::full({}, options.init_scale(), device.dtype(at::kFloat));
    tracker = at::full({}, init_tracker, device.dtype(at::kInt));
  }
  return output * scale.to(output.device(), /*non_blocking=*/true);
}

void GradScaler::Impl::check_has_scale(const char* call) const {
  if (!scale.defined()) {
    raise(
        {.call = call},
        "no loss was scaled yet, so gradients are not scaled. Call scaler.scale(loss).backward() first.");
  }
}

/// The ranks to agree with; nothing if this process trains alone.
std::optional<Group> GradScaler::Impl::peers() const {
  std::optional<Group> group = options.group();
  if (!group && is_initialized()) {
    group = world();
  }
  return group && group->size() > 1 ? group : std::nullopt;
}

void GradScaler::Impl::compare_settings(const Group& group) {
  if (!compares_settings) {
    return;
  }
  agree(
      group,
      "GradScaler",
      {fmt::format("scale {}", scale.item<float>()),
       fmt::format("growth tracker {}", tracker.item<int32_t>()),
       fmt::format("growth_factor {}", options.growth_factor()),
       fmt::format("backoff_factor {}", options.backoff_factor()),
       fmt::format("growth_interval {}", options.growth_interval())});
  compares_settings = false;
}

void GradScaler::Impl::agree_on_found_inf() {
  const auto group = peers();
  if (group && !optimizers.is_agreed()) {
    compare_settings(*group);
    optimizers.agree(*group);
  }
}

void GradScaler::Impl::set(GradScalerOptions changed, const char* call) {
  train::check_scaler_options(changed, call);
  options = std::move(changed);
  compares_settings = true;
}

GradScaler::GradScaler(const GradScalerOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (options.enabled()) {
    train::check_scaler_options(options, "GradScaler");
  }
  impl_->options = options;
}

GradScaler::~GradScaler() = default;

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  return is_enabled() ? impl_->apply(outputs) : outputs;
}

std::vector<at::Tensor> GradScaler::scale(
    const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) {
    scaled.push_back(scale(output));
  }
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) {
    return;
  }
  constexpr const char* kCall = "GradScaler::unscale_";
  impl_->check_has_scale(kCall);
  if (const auto* scaled = impl_->optimizers.find(optimizer)) {
    raise(
        {.call = kCall},
        scaled->has_stepped
            ? "it is called after step(). Call update() at the end of each iteration."
            : "unscale_() has been called for this optimizer since the last update(): its gradients would be divided twice.");
  }
  train::check_can_unscale(optimizer);
  impl_->take_part_in_recording();
  impl_->optimizers.add(
      optimizer, train::unscale_gradients(optimizer, impl_->scale));
}

at::Tensor GradScaler::clip_grad_norm_(
    ModuleRef model,
    double max_norm,
    double norm_type) {
  if (!is_enabled()) {
    return tessera::clip_grad_norm_(model, max_norm, norm_type);
  }
  if (!impl_->optimizers.has_unstepped()) {
    raise(
        {.call = "GradScaler::clip_grad_norm_"},
        "gradients are still scaled. Call unscale_(optimizer) first, for each optimizer of the model.");
  }
  const auto group = impl_->peers();
  if (group) {
    impl_->compare_settings(*group);
  }
  const at::Tensor norm = tessera::clip_grad_norm_(model, max_norm, norm_type);
  // A maximum over ranks may lose a NaN.
  const bool is_shared =
      group && !std::isinf(norm_type) && shares_norm(model, *group);
  impl_->optimizers.note_norm(model, norm, is_shared);
  return norm;
}

at::Tensor GradScaler::step(
    torch::optim::Optimizer& optimizer,
    torch::optim::Optimizer::LossClosure closure) {
  if (!is_enabled()) {
    return closure ? optimizer.step(std::move(closure)) : optimizer.step();
  }
  constexpr const char* kCall = "GradScaler::step";
  if (closure) {
    raise<c10::NotImplementedError>(
        {.call = kCall},
        "a closure is not supported: gradients must be unscaled between its backward and the step. Compute the gradients first.");
  }
  impl_->check_has_scale(kCall);
  auto* scaled = impl_->optimizers.find(optimizer);
  if (scaled != nullptr && scaled->has_stepped) {
    raise(
        {.call = kCall},
        "step() has been called for this optimizer since the last update(). Call update() at the end of each iteration.");
  }
  if (scaled == nullptr) {
    unscale_(optimizer);
    scaled = impl_->optimizers.find(optimizer);
  }
  impl_->agree_on_found_inf();
  return scaled->step();
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) {
    return;
  }
  constexpr const char* kCall = "GradScaler::update";
  impl_->check_has_scale(kCall);
  if (new_scale) {
    train::check_scaler_options(
        GradScalerOptions(impl_->options).init_scale(*new_scale), kCall);
  } else if (impl_->optimizers.empty()) {
    raise(
        {.call = kCall},
        "no gradient was unscaled since the last update(). Call step(optimizer) first.");
  }
  impl_->take_part_in_recording();
  const at::NoGradGuard no_grad;
  impl_->agree_on_found_inf();
  const at::Tensor found_inf = impl_->optimizers.found_inf(impl_->scale);
  if (new_scale) {
    impl_->scale.fill_(*new_scale);
    impl_->compares_settings = true;
  } else {
    at::_amp_update_scale_(
        impl_->scale,
        impl_->tracker,
        found_inf,
        impl_->options.growth_factor(),
        impl_->options.backoff_factor(),
        impl_->options.growth_interval());
  }
  impl_->last_found_inf = found_inf;
  impl_->optimizers.clear();
}

void GradScaler::discard() {
  impl_->optimizers.clear();
}

bool GradScaler::skipped() const {
  return impl_->last_found_inf.defined() &&
      impl_->last_found_inf.item<float>() != 0;
}

double GradScaler::get_scale() const {
  return !is_enabled()         ? 1
      : impl_->scale.defined() ? impl_->scale.item<float>()
                               : impl_->options.init_scale();
}

bool GradScaler::is_enabled() const {
  return impl_->options.enabled();
}

double GradScaler::get_growth_factor() const {
  return impl_->options.growth_factor();
}

void GradScaler::set_growth_factor(double new_factor) {
  impl_->set(
      GradScalerOptions(impl_->options).growth_factor(new_factor),
      "GradScaler::set_growth_factor");
}

double GradScaler::get_backoff_factor() const {
  return impl_->options.backoff_factor();
}

void GradScaler::set_backoff_factor(double new_factor) {
  impl_->set(
      GradScalerOptions(impl_->options).backoff_factor(new_factor),
      "GradScaler::set_backoff_factor");
}

int64_t GradScaler::get_growth_interval() const {
  return impl_->options.growth_interval();
}

void GradScaler::set_growth_interval(int64_t new_interval) {
  impl_->set(
      GradScalerOptions(impl_->options).growth_interval(new_interval),
      "GradScaler::set_growth_interval");
}

StateDict GradScaler::state_dict() {
  if (!is_enabled()) {
    return {};
  }
  const int64_t tracker = impl_->tracker.defined()
      ? impl_->tracker.item<int32_t>()
      : impl_->init_tracker;
  return {
      {"scale", get_scale()},
      {"growth_factor", get_growth_factor()},
      {"backoff_factor", get_backoff_factor()},
      {"growth_interval", get_growth_interval()},
      {"_growth_tracker", tracker}};
}

GradScaler::Impl::Loaded GradScaler::Impl::read(const StateDict& state) const {
  if (state.empty()) {
    raise<c10::ValueError>(
        {.call = kLoad},
        "the dictionary is empty, as that of a scaler that is off. Load the state of one that is on, or make this one with enabled(false).");
  }
  Loaded loaded{
      .options = GradScalerOptions(options)
                     .init_scale(state.at("scale").to_double())
                     .growth_factor(state.at("growth_factor").to_double())
                     .backoff_factor(state.at("backoff_factor").to_double())
                     .growth_interval(state.at("growth_interval").to_int()),
      .tracker = state.at("_growth_tracker").to_int()};
  train::check_scaler_options(loaded.options, kLoad);
  if (loaded.tracker < 0 ||
      loaded.tracker > std::numeric_limits<int32_t>::max()) {
    raise<c10::ValueError>(
        {.call = kLoad},
        fmt::format(
            "_growth_tracker is {}; expected 0 or more.", loaded.tracker));
  }
  return loaded;
}

void GradScaler::check_state_dict(const StateDict& state) const {
  if (is_enabled()) {
    impl_->read(state);
  }
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!is_enabled()) {
    return;
  }
  const auto [changed, tracker] = impl_->read(state);
  impl_->set(changed, kLoad);
  impl_->init_tracker = tracker;
  if (impl_->scale.defined()) {
    impl_->scale.fill_(impl_->options.init_scale());
    impl_->tracker.fill_(tracker);
  }
}

} // namespace tessera
