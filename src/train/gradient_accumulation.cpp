#include <tessera/comm/agree.h>
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/train/gradient_accumulation.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "comm/group/all_or_none.h"
#include "libtorch/recording.h"
#include "train/accumulation_options.h"
#include "train/gradient_averager.h"

namespace tessera {
namespace {

constexpr const char* kAccumulation = "GradientAccumulation";
constexpr const char* kAccumulate = "GradientAccumulation::backward";
constexpr const char* kOpenAccumulation =
    "a captured step must make a whole accumulation: all of its micro-batches, from the first to the last. Pass them to one call of CapturedStep.";

/// The nearest one.
double power_of_two(double value) {
  return std::exp2(std::round(std::log2(value)));
}

/// How the micro-batches of a step are weighted.
enum class Weights {
  Unknown, // none has come yet
  Equal,
  Samples,
};

} // namespace

/// [Note: weights of micro-batches]
///
/// With W ranks whose gradients are averaged and n samples in a micro-batch,
/// the wanted gradient is the sum of n * gradient over all micro-batches and
/// ranks, divided by the sum N of all n. N is known only when all micro-batches
/// are there. So losses are multiplied by n / (typical * steps) at first, where
/// `typical` is the same on all ranks; the averages are multiplied by
/// typical * steps * W / N in the end. `typical` is about the mean of n in the
/// step before, so that neither factor is far from that of equal micro-batches.
/// It is a power of two, which changes exponents alone: whatever it is, the
/// gradients have the same bits, and a run that resumes repeats them.
/// Without numbers of samples, n and `typical` are 1 and N is W * steps, or
/// less in a flush().
struct GradientAccumulation::Impl {
  const train::GradientAverager model;
  const OptimizerRefs optimizers;
  const GradientAccumulationOptions options;

  /// What this rank has accumulated since the last step.
  struct Pending {
    int64_t batches = 0;
    Weights weights = Weights::Unknown;
    double samples = 0;
    bool has_negative = false; // among the numbers of samples
  };
  Pending pending;
  double typical = 1; // the same on all ranks; a power of two
  at::Tensor grad_norm; // of the last step; undefined: none

  double steps() const {
    return static_cast<double>(options.steps());
  }

  void begin();
  void drop();
  void take_part_in_recording();
  double weight(Weights kind, double num_samples);
  bool backward(const at::Tensor& loss, Weights kind, double num_samples);
  bool flush();
  /// A call that fails leaves nothing pending.
  template <class Call>
  bool or_drop(const Call& call);
  std::optional<double> correction();
  void clip();
  void step(double factor);
};

/// Forgets the micro-batches, and prepares for the next: the front ends want to
/// know before its forward whether gradients are averaged.
void GradientAccumulation::Impl::begin() {
  for (const auto& optimizer : optimizers) {
    optimizer.get().zero_grad();
  }
  pending = {};
  model.set_syncs(options.sync_each_batch() || options.steps() == 1);
}

void GradientAccumulation::Impl::drop() {
  model.drop_waiting();
  if (options.scaler() != nullptr) {
    options.scaler()->discard();
  }
  begin();
}

template <class Call>
bool GradientAccumulation::Impl::or_drop(const Call& call) {
  try {
    return call();
  } catch (...) {
    drop();
    throw;
  }
}

/// A replay counts no micro-batches.
void GradientAccumulation::Impl::take_part_in_recording() {
  libtorch::take_part_in_recording(
      {.owner = this,
       .objection =
           [this] {
             return pending.batches == 0 ? std::string() : kOpenAccumulation;
           },
       .settings =
           [this] {
             return fmt::format(
                 "{} {}", pending.batches, static_cast<int>(pending.weights));
           },
       .forget =
           [this, norm = grad_norm] {
             drop();
             grad_norm = norm;
           },
       .finish =
           [this] {
             if (pending.batches != 0) {
               raise({.call = kAccumulate}, kOpenAccumulation);
             }
             return [this, then = pending, norm = grad_norm] {
               pending = then;
               grad_norm = norm;
             };
           }});
}

/// What to multiply a loss by.
double GradientAccumulation::Impl::weight(Weights kind, double num_samples) {
  if (pending.weights != Weights::Unknown && pending.weights != kind) {
    raise(
        {.call = kAccumulate},
        "micro-batches of one step came with and without a number of samples. Pass the number for all of them, or for none.");
  }
  pending.weights = kind;
  if (kind == Weights::Equal) {
    return 1 / steps();
  }
  pending.samples += num_samples;
  pending.has_negative = pending.has_negative || num_samples < 0;
  return num_samples / (typical * steps());
}

bool GradientAccumulation::Impl::backward(
    const at::Tensor& loss,
    Weights kind,
    double num_samples) {
  const at::Tensor weighted = loss * weight(kind, num_samples);
  GradScaler* scaler = options.scaler();
  (scaler != nullptr ? scaler->scale(weighted) : weighted).backward();
  ++pending.batches;
  if (pending.batches < options.steps()) {
    model.set_syncs(
        options.sync_each_batch() || pending.batches + 1 == options.steps());
    return false;
  }
  step(correction().value());
  return true;
}

bool GradientAccumulation::Impl::flush() {
  const std::optional<double> factor = correction();
  if (!factor) {
    return false;
  }
  if (!options.sync_each_batch()) {
    model.reduce();
  }
  step(*factor);
  return true;
}

/// What to multiply the averages by; nothing if no rank has a micro-batch.
/// Collective, except for a whole step without numbers.
std::optional<double> GradientAccumulation::Impl::correction() {
  const bool is_equal = pending.weights == Weights::Equal;
  if (is_equal && pending.batches == options.steps()) {
    return 1;
  }
  const at::Tensor sums = at::empty({4}, at::kDouble);
  auto* sum = sums.mutable_data_ptr<double>();
  sum[0] = static_cast<double>(pending.batches);
  sum[1] = is_equal ? 1 : 0;
  sum[2] = pending.samples;
  sum[3] = pending.has_negative ? 1 : 0;
  for (const Group& group : model.groups()) {
    group.all_reduce(sums, ReduceOp::Sum, "GradientAccumulation: samples");
  }
  if (sum[0] == 0) {
    return std::nullopt;
  }
  if (sum[1] > 0) {
    // Without numbers, each rank knows only how many micro-batches it has.
    for (const Group& group : model.groups()) {
      agree(
          group,
          "GradientAccumulation::flush",
          {fmt::format(
              "{} micro-batches since the last step, {} numbers of samples",
              pending.batches,
              is_equal ? "without" : "with")});
    }
    return steps() / static_cast<double>(pending.batches);
  }
  if (sum[3] > 0 || sum[2] == 0) {
    raise<c10::ValueError>(
        {.call = kAccumulate},
        sum[3] > 0
            ? "a rank passed a negative number of samples. Pass how many samples the loss is the mean of."
            : "no rank had a sample in this step. Pass how many samples the loss is the mean of.");
  }
  const double factor = typical * steps() * model.num_ranks() / sum[2];
  typical = power_of_two(sum[2] / sum[0]);
  return factor;
}

void GradientAccumulation::Impl::clip() {
  if (!options.max_norm()) {
    return;
  }
  GradScaler* scaler = options.scaler();
  const double max_norm = *options.max_norm();
  grad_norm = scaler != nullptr
      ? scaler->clip_grad_norm_(model.module(), max_norm, options.norm_type())
      : clip_grad_norm_(model.module(), max_norm, options.norm_type());
  if (!options.error_if_nonfinite()) {
    return;
  }
  const auto norm = grad_norm.item<double>();
  if (!std::isfinite(norm)) {
    raise(
        {.call = kAccumulation},
        fmt::format(
            "the norm of the gradients is {}, so the step was not made. Lower the learning rate, or look for a loss that is not finite.",
            norm));
  }
}

/// Gradients are averages of weighted ones; `factor` makes means of them.
void GradientAccumulation::Impl::step(double factor) {
  GradScaler* scaler = options.scaler();
  if (scaler != nullptr) {
    if (pending.batches == 0) { // this rank scaled no loss, maybe never did
      scaler->scale(at::zeros({}, model.device()));
    }
    for (const auto& optimizer : optimizers) {
      scaler->unscale_(optimizer);
    }
  }
  if (factor != 1) {
    model.multiply_gradients(factor);
  }
  clip();
  for (const auto& optimizer : optimizers) {
    if (scaler != nullptr) {
      scaler->step(optimizer);
    } else {
      optimizer.get().step();
    }
  }
  if (scaler != nullptr) {
    scaler->update();
  }
  begin();
}

GradientAccumulation::GradientAccumulation(
    ModuleRef model,
    OptimizerRefs optimizers,
    const GradientAccumulationOptions& options)
    : GradientAccumulation(
          model.get(),
          nullptr,
          std::move(optimizers),
          options) {}

GradientAccumulation::GradientAccumulation(
    torch::nn::Module& model,
    detail::DDPHandle* ddp,
    OptimizerRefs optimizers,
    const GradientAccumulationOptions& options) {
  const train::GradientAverager averaged(model, ddp);
  comm::all_or_none(averaged.groups(), kAccumulation, [&] {
    averaged.check(kAccumulation);
    train::check_accumulation(options, optimizers);
  });
  train::agree_on_accumulation(options, averaged.groups());
  // NOLINTNEXTLINE(modernize-make-unique): which takes no designated fields.
  impl_ = std::unique_ptr<Impl>(new Impl{
      .model = averaged,
      .optimizers = std::move(optimizers),
      .options = options,
      .typical = power_of_two(options.typical_samples())});
  impl_->begin();
}

GradientAccumulation::~GradientAccumulation() {
  impl_->model.set_syncs(true);
}

bool GradientAccumulation::backward(
    const at::Tensor& loss,
    int64_t num_samples) {
  libtorch::refuse_in_recording(
      kAccumulate,
      "Call backward(loss) without a number of samples, or run the step without CapturedStep.");
  return impl_->or_drop([&] {
    return impl_->backward(
        loss, Weights::Samples, static_cast<double>(num_samples));
  });
}

bool GradientAccumulation::backward(const at::Tensor& loss) {
  impl_->take_part_in_recording();
  return impl_->or_drop(
      [&] { return impl_->backward(loss, Weights::Equal, 1); });
}

bool GradientAccumulation::flush() {
  impl_->take_part_in_recording();
  return impl_->or_drop([&] { return impl_->flush(); });
}

void GradientAccumulation::discard() {
  impl_->drop();
}

int64_t GradientAccumulation::num_pending() const {
  return impl_->pending.batches;
}

int64_t GradientAccumulation::steps() const {
  return impl_->options.steps();
}

std::optional<double> GradientAccumulation::grad_norm() const {
  const at::Tensor& norm = impl_->grad_norm;
  return norm.defined() ? std::optional(norm.item<double>()) : std::nullopt;
}

bool GradientAccumulation::skipped() const {
  return impl_->options.scaler() != nullptr &&
      impl_->options.scaler()->skipped();
}

} // namespace tessera
