#include <tessera/engine/seed.h>
#include <tessera/error.h>
#include <tessera/train/captured_step.h>

#include <c10/util/ScopeExit.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "ddp/open_joins.h"
#include "libtorch/recording.h"
#include "train/captured/device_rates.h"
#include "train/captured/step_agreement.h"
#include "train/captured/step_cache.h"
#include "train/captured/step_effects.h"
#include "train/captured/step_guards.h"
#include "train/captured/step_kind.h"
#include "train/captured/step_objections.h"
#include "train/captured/step_recording.h"
#include "train/timeline.h"

namespace tessera {
namespace {

using train::Action;
using train::Decision;
using train::kCapturedStep;
using train::KnownKind;

/// How often a kind of step is tried at once: what one capture lacked (the
/// state of a parameter) may be there at the next.
constexpr int kAttempts = 2;
/// Later attempts, for what may pass (memory that was short), wait for so many
/// calls, and each for twice as many as the one before.
constexpr int64_t kCallsBetweenAttempts = 500;
constexpr int kMostDoublings = 10;

/// [Note: captured steps]
///
/// The host's part of a step runs once, when the step is recorded. In a replay,
/// what the host would have done is either done on the device or repeated here:
///
/// - Values that change from step to step are read on the device: inputs are
///   copied to where the step was recorded with them, learning rates lie in
///   scalars (DeviceRates), counts of steps and the scale do anyway.
/// - Random numbers: a graph knows how many it draws, and a replay advances the
///   generator by them. Second runs of recomputed functions would have to set
///   the generator back, which a recording cannot: recompute() refuses
///   functions that draw while a step is recorded (recompute/surroundings.h).
/// - Host objects that the step changes (counts of writes, version counters,
///   which gradients there are) are changed in the same way around each replay
///   (StepEffects). A unit is Sharded when a recording begins and ends, and
///   keeps no cast (CastShard), so every replay gathers and casts what it uses.
///   After a replay that wrote to the model, units that are Full are stale.
///   Scalers, accumulations and DistributedDataParallel restore their own state
///   (libtorch::HostPart). Objects whose work on the host is needed in every
///   step, such as schedules, refuse to be recorded
///   (libtorch::refuse_in_recording()).
/// - Whatever else the step takes for granted is its kind (kind_of_step()) and
///   the places of its tensors (places_of()). A step of another kind is
///   recorded anew, when it comes for the second time: what the first one makes
///   once (the state of a parameter, a table that a module caches, a workspace)
///   must not be made in a recording.
/// - Sharded modules outside the model are refused (expect_in_recording()): a
///   replay would neither gather them nor count writes to them.
/// - Several ranks do the same in every call: all replay, all record, or all
///   run the function, whichever any of them needs (StepRanks). Otherwise one
///   rank's recorded collectives would meet another's in another order. What
///   ranks compare on the host is left out while they record, since one of them
///   may fail on the way (engine::OrderCheck::pause(), ddp::Reducer,
///   comm::all_or_none()). In its place they compare digests of the collectives
///   that they recorded: after a capture, and in each call those of the graphs
///   that they are about to replay; and parameters that are not sharded beside
///   units, in calls 2, 4, 8 and so on. The order of gathers is foreseen from
///   the steps of this object alone, eager or recorded, so that an evaluation
///   in between changes nothing.
/// - While a Join is open, all steps are eager, and the ranks do not exchange
///   what they need: a rank without inputs can take part in eager steps alone.
///
/// Autograd runs a node on the stream on which the node was made. Nodes that
/// live from step to step, gather nodes and accumulators that somebody holds,
/// are moved to the recording stream first: a recording must not wait for
/// another stream's past. Afterwards they are moved back to the caller's.

void check_captured_step(
    const CapturedStepOptions& options,
    const CapturedStep::Function& step,
    const OptimizerRefs& optimizers) {
  const auto refuse = [](const std::string& what) {
    raise<c10::ValueError>({.call = kCapturedStep}, what);
  };
  if (!step) {
    refuse("there is no function to run.");
  }
  if (optimizers.empty()) {
    refuse(
        "there is no optimizer. Pass every optimizer that the function steps: {optimizer}.");
  }
  if (options.warmup_steps() < 1) {
    refuse(fmt::format(
        "warmup_steps is {}; expected 1 or more: the first step makes the state of the optimizers.",
        options.warmup_steps()));
  }
  if (options.max_graphs() < 1) {
    refuse(fmt::format(
        "max_graphs is {}; expected 1 or more.", options.max_graphs()));
  }
}

/// An eager step that the program knows of.
Decision expected(std::string reason) {
  return {Action::Run, std::move(reason), /*is_expected=*/true};
}

} // namespace

struct CapturedStep::Impl {
  Impl(
      torch::nn::Module& model,
      const OptimizerRefs& optimizers,
      Function step,
      const CapturedStepOptions& given);

  // Constant after construction.
  const CapturedStepOptions options;
  const Function function;
  const train::StepParts parts;
  const train::StepRanks ranks;
  const std::unique_ptr<train::GraphDevice> device; // null: cannot record

  // Changed by calls.
  int64_t num_calls = 0;
  std::string objection; // to all captures; empty: none
  train::StepCache cache;
  train::DeviceRates rates;
  engine::GatherOrder::Orders orders; // of the steps' gathers
  std::set<std::string> warned_of;

  // About the last call.
  bool replayed = false;
  std::string eager_reason;

  at::Tensor run(const std::vector<at::Tensor>& given);
  std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& given) const;
  bool is_warming_up() const {
    return num_calls <= options.warmup_steps();
  }
  Decision decide(const KnownKind& kind) const;
  at::Tensor run_eagerly(
      const std::vector<at::Tensor>& inputs,
      const Decision& decision);
  at::Tensor replay(
      train::RecordedStep& recorded,
      const std::vector<at::Tensor>& inputs);
  /// Null if it failed, and then kind.reason says why.
  train::RecordedStep* capture(
      KnownKind& kind,
      const std::vector<at::Tensor>& inputs);
  void note_failure(KnownKind& kind) const;
};

CapturedStep::Impl::Impl(
    torch::nn::Module& model,
    const OptimizerRefs& optimizers,
    Function step,
    const CapturedStepOptions& given)
    : options(given),
      function(std::move(step)),
      parts(model, optimizers),
      ranks(parts),
      device(train::make_graph_device(parts.device())),
      cache(options),
      rates(optimizers, parts.device()) {
  if (device != nullptr) {
    objection = train::objection_to(parts, ranks);
  }
}

std::vector<at::Tensor> CapturedStep::Impl::on_device(
    const std::vector<at::Tensor>& given) const {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : given) {
    inputs.push_back(
        input.defined() ? input.to(device->device(), /*non_blocking=*/true)
                        : input);
  }
  return inputs;
}

at::Tensor CapturedStep::Impl::run(const std::vector<at::Tensor>& given) {
  libtorch::refuse_in_recording(
      kCapturedStep,
      "Call one captured step after the other, or combine them into one.");
  replayed = false;
  if (device == nullptr) {
    eager_reason = "this device cannot record steps.";
    return parts.result_of(function(given));
  }
  if (!parts.units.empty()) {
    seed_per_rank(); // the touch of a unit does, and a replay touches none
  }
  const std::vector<at::Tensor> inputs = on_device(given);
  ++num_calls;
  if (ranks.are_several() && ddp::is_any_join_open()) {
    return run_eagerly(
        inputs,
        expected(
            "a Join is open, and a rank without inputs cannot take part in a captured step."));
  }
  KnownKind& kind = cache.find(
      train::kind_of_step(parts, inputs),
      num_calls,
      train::places_of(parts),
      device->epoch(),
      /*warns=*/!is_warming_up() && objection.empty());
  Decision mine = decide(kind);
  ++kind.calls;
  const uint64_t collectives =
      mine.action == Action::Replay ? kind.current()->collectives : 0;
  const Decision agreed = ranks.agree(std::move(mine), collectives);
  if (agreed.action == Action::Run) {
    return run_eagerly(inputs, agreed);
  }
  if (!parts.units.empty() &&
      std::has_single_bit(static_cast<uint64_t>(num_calls))) {
    parts.units.front()->schedule().check().compare_plain();
  }
  train::RecordedStep* recorded =
      agreed.action == Action::Record ? capture(kind, inputs) : kind.current();
  return recorded != nullptr ? replay(*recorded, inputs)
                             : run_eagerly(inputs, {Action::Run, kind.reason});
}

/// What this rank would do.
Decision CapturedStep::Impl::decide(const KnownKind& kind) const {
  if (is_warming_up()) {
    return expected("steps before the first capture run eagerly.");
  }
  if (std::string reason =
          objection.empty() ? train::present_objection_to(parts) : objection;
      !reason.empty()) {
    return {Action::Run, std::move(reason)};
  }
  if (train::is_timeline_active()) {
    return expected("a timeline watches this step.");
  }
  if (kind.calls == 0) {
    return expected(
        "this is the first step of its kind; the next one of it is captured.");
  }
  if (kind.current() != nullptr) {
    return {Action::Replay};
  }
  return kind.attempts < kAttempts || num_calls >= kind.next_attempt
      ? Decision{Action::Record}
      : Decision{Action::Run, kind.reason};
}

at::Tensor CapturedStep::Impl::run_eagerly(
    const std::vector<at::Tensor>& inputs,
    const Decision& decision) {
  const std::string& reason = decision.reason;
  if (!decision.is_expected) {
    if (options.require_capture()) {
      raise({.call = kCapturedStep}, "the step cannot be captured: " + reason);
    }
    if (warned_of.insert(reason).second) {
      TORCH_WARN(
          "CapturedStep cannot capture this step and runs it eagerly, which is slower: ",
          reason);
    }
  }
  eager_reason = reason;
  const train::OrdersOfSteps foreseen(parts.units, orders);
  if (!objection.empty()) { // for good: a plain step
    return parts.result_of(function(inputs));
  }
  const auto before = train::rates_of(parts.optimizers);
  at::Tensor output;
  {
    const train::DeviceRates::Scope on_device(rates);
    train::on_recording_stream(
        *device, parts, [&] { output = parts.result_of(function(inputs)); });
  }
  objection = train::objection_to_replaced(parts.replaced());
  if (train::rates_of(parts.optimizers) != before) {
    objection =
        "it changes learning rates, which a replay cannot do. Change them, and call schedule.step(), before or after the captured step.";
  }
  return output;
}

at::Tensor CapturedStep::Impl::replay(
    train::RecordedStep& recorded,
    const std::vector<at::Tensor>& inputs) {
  rates.write();
  recorded.last_use = num_calls;
  replayed = true;
  eager_reason.clear();
  return recorded.replay(inputs);
}

train::RecordedStep* CapturedStep::Impl::capture(
    KnownKind& kind,
    const std::vector<at::Tensor>& inputs) {
  const train::ChecksPaused paused(parts.units);
  const train::OrdersOfSteps foreseen(parts.units, orders);
  const train::EffectsWatch watch(parts);
  const train::RecordedStep* const old = kind.current(); // if others need one
  std::unique_ptr<train::RecordedStep> recorded;
  train::HostParts host_parts;
  auto give_up = c10::make_scope_exit([&] {
    recorded = nullptr;
    if (old == nullptr) {
      note_failure(kind);
    }
    for (const auto& entry : host_parts) {
      if (entry.part.lives()) {
        entry.part.forget();
      }
    }
    watch.undo();
  });
  std::string reason;
  try {
    recorded = train::record_step(
        {parts, *device, rates, function}, inputs, watch, host_parts);
    recorded->last_use = num_calls;
  } catch (const std::exception& error) {
    recorded = nullptr;
    reason = train::text_of(error);
    reason = reason.empty() ? "an error without a text." : reason;
  }
  kind.reason = ranks.agree_on_capture(
      reason, recorded != nullptr ? recorded->collectives : 0);
  if (!kind.reason.empty()) {
    return nullptr;
  }
  give_up.release();
  kind.attempts = 0;
  return &cache.keep(kind, std::move(recorded), old);
}

void CapturedStep::Impl::note_failure(KnownKind& kind) const {
  const int doublings =
      std::clamp(++kind.attempts - kAttempts, 0, kMostDoublings);
  kind.next_attempt = num_calls + (kCallsBetweenAttempts << doublings);
}

CapturedStep::CapturedStep(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    Function step,
    const CapturedStepOptions& options) {
  check_captured_step(options, step, optimizers);
  impl_ =
      std::make_unique<Impl>(model.get(), optimizers, std::move(step), options);
}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()(const std::vector<at::Tensor>& inputs) {
  return impl_->run(inputs);
}

bool CapturedStep::was_replayed() const {
  return impl_->replayed;
}

const std::string& CapturedStep::eager_reason() const {
  return impl_->eager_reason;
}

size_t CapturedStep::num_graphs() const {
  return impl_->cache.num_graphs();
}

} // namespace tessera
