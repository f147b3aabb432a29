#include <tessera/comm/init.h>
#include <tessera/engine/seed.h>
#include <tessera/error.h>
#include <tessera/optim/capturable.h>
#include <tessera/train/captured_step.h>

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "comm/group/all_or_none.h"
#include "ddp/open_joins.h"
#include "engine/plain_params.h"
#include "engine/schedule.h"
#include "libtorch/recording.h"
#include "train/captured/device_rates.h"
#include "train/captured/step_effects.h"
#include "train/captured/step_kind.h"
#include "train/captured/step_recording.h"

namespace tessera {
namespace {

constexpr const char* kCapturedStep = "CapturedStep";

/// How often a kind of step is tried: what one capture lacked (the state of a
/// parameter) may be there at the next.
constexpr int kAttempts = 2;

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
///   (engine::HostPart). Objects whose work on the host is needed in every
///   step, such as schedules, refuse to be recorded
///   (engine::refuse_in_recording()).
/// - Whatever else the step takes for granted is its kind (kind_of_step()) and
///   the places of its tensors (places_of()); a step of another kind is
///   recorded anew.
/// - Several ranks do the same in every call: all replay, all record, or all
///   run the function, whichever any of them needs (agree_on()). Otherwise one
///   rank's recorded collectives would meet another's in another order. What
///   ranks compare on the host is left out while they record, since one of them
///   may fail on the way (Schedule::pause_checks(), ddp::Reducer,
///   comm::all_or_none()). In its place they compare digests of the collectives
///   that they recorded: after a capture, and in each call those of the graphs
///   that they are about to replay. The order of gathers is foreseen from the
///   steps of this object alone, eager or recorded, so that an evaluation in
///   between changes nothing.
/// - While a Join is open, all steps are eager, and the ranks do not exchange
///   what they need: a rank without inputs can take part in eager steps alone.
///
/// Autograd runs a node on the stream on which the node was made. Nodes that
/// live from step to step, gather nodes and accumulators that somebody holds,
/// are moved to the recording stream first: a recording must not wait for
/// another stream's past.

/// What a call does. Among ranks the last of these wins.
enum class Action { Replay, Record, Run };

/// What is known of one kind of step.
struct Kind {
  /// With different settings of their host parts, see engine::HostPart.
  std::vector<std::unique_ptr<train::RecordedStep>> recorded;
  int attempts = 0; // that failed
  std::string reason; // why the last one failed

  /// The one for the settings of now, or null.
  train::RecordedStep* current() const {
    const auto found =
        std::find_if(recorded.begin(), recorded.end(), [](const auto& step) {
          return step->holds();
        });
    return found == recorded.end() ? nullptr : found->get();
  }
};

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

at::Device device_of(const train::StepParts& parts) {
  for (const auto& unit : parts.units) {
    for (const engine::Bundle& bundle : unit->bundles()) {
      return bundle.full().device();
    }
  }
  return parts.params.empty() ? at::Device(at::kCPU)
                              : parts.params.front().device();
}

} // namespace

struct CapturedStep::Impl {
  Impl(
      torch::nn::Module& model,
      const OptimizerRefs& optimizers,
      Function step,
      const CapturedStepOptions& given);

  const CapturedStepOptions options;
  const Function function;
  const train::StepParts parts;
  const std::unique_ptr<train::GraphDevice> device; // null: cannot record
  train::DeviceRates rates;

  const std::optional<Group> ranks; // that make the step together; of several
  int64_t num_calls = 0;
  std::string objection; // to all captures; empty: none
  uint64_t places = 0; // of what the graphs use
  uint64_t epoch = 0; // see GraphDevice
  std::map<std::string, Kind> kinds;
  int64_t num_captures = 0;
  engine::GatherOrder::Orders orders; // of the steps' gathers
  bool replayed = false;
  std::string eager_reason;
  std::set<std::string> warned_of;

  bool is_warming_up() const {
    return num_calls <= options.warmup_steps();
  }
  at::Tensor run(const std::vector<at::Tensor>& given);
  std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& given) const;
  std::string find_objection() const;
  std::optional<Group> find_ranks() const;
  std::string present_objection() const;
  Kind& find_kind(const std::vector<at::Tensor>& inputs);
  struct Decision {
    Action action = Action::Run;
    std::string reason; // why it runs eagerly; empty: it is meant to
  };
  Decision decide(const Kind& kind) const;
  Decision agree_on(Decision mine, const Kind& kind) const;

  at::Tensor run_eagerly(
      const std::vector<at::Tensor>& inputs,
      const std::string& reason);
  at::Tensor replay(
      train::RecordedStep& recorded,
      const std::vector<at::Tensor>& inputs);
  /// Null if it failed, and then kind.reason says why.
  train::RecordedStep* capture(
      Kind& kind,
      const std::vector<at::Tensor>& inputs);
  std::string agree_on_capture(
      const train::RecordedStep* recorded,
      const std::string& reason) const;
  void note_capture();
  void forget_oldest();
  size_t num_recorded() const;
};

namespace {

/// As long as it lives, ranks compare nothing: see [Note: captured steps].
class ChecksPaused {
 public:
  explicit ChecksPaused(const std::vector<std::shared_ptr<engine::Unit>>& units)
      : units_(units) {
    set(true);
  }
  ~ChecksPaused() {
    set(false);
  }
  ChecksPaused(const ChecksPaused&) = delete;
  ChecksPaused& operator=(const ChecksPaused&) = delete;

 private:
  void set(bool on) {
    for (const auto& unit : units_) {
      unit->schedule().pause_checks(on);
    }
  }

  const std::vector<std::shared_ptr<engine::Unit>>& units_;
};

/// As long as it lives, gathers are foreseen as in steps before.
class OrdersOfSteps {
 public:
  OrdersOfSteps(
      const std::vector<std::shared_ptr<engine::Unit>>& units,
      engine::GatherOrder::Orders& orders)
      : units_(units), orders_(orders) {
    exchange();
  }
  ~OrdersOfSteps() {
    exchange();
  }
  OrdersOfSteps(const OrdersOfSteps&) = delete;
  OrdersOfSteps& operator=(const OrdersOfSteps&) = delete;

 private:
  void exchange() {
    if (!units_.empty()) { // they have one schedule, or nothing is captured
      units_.front()->schedule().exchange_orders(orders_);
    }
  }

  const std::vector<std::shared_ptr<engine::Unit>>& units_;
  engine::GatherOrder::Orders& orders_;
};

} // namespace

CapturedStep::Impl::Impl(
    torch::nn::Module& model,
    const OptimizerRefs& optimizers,
    Function step,
    const CapturedStepOptions& given)
    : options(given),
      function(std::move(step)),
      parts(model, optimizers),
      device(train::make_graph_device(device_of(parts))),
      rates(optimizers, device_of(parts)),
      ranks(find_ranks()) {
  if (device != nullptr) {
    objection = find_objection();
  }
}

/// The ranks that the step trains with, if there are several.
std::optional<Group> CapturedStep::Impl::find_ranks() const {
  const auto groups = parts.groups();
  return groups.empty() ? std::nullopt : std::optional(groups.front());
}

std::string CapturedStep::Impl::find_objection() const {
  for (const auto& optimizer : parts.optimizers) {
    if (const auto found = optim::capture_objection(optimizer)) {
      return *found;
    }
  }
  if (parts.groups().size() > 1) {
    return "the step trains over several groups of ranks. Use one group for model and optimizers.";
  }
  if (!ranks && parts.units.empty() && is_initialized() && world().size() > 1) {
    return "this process has other ranks, and CapturedStep cannot know whether they take part in the step. Use fully_shard or DistributedDataParallel.";
  }
  for (const auto& unit : parts.units) {
    if (unit->options().offload) {
      return "shards in host memory are copied by the host. Leave out the offload policy.";
    }
    if (&unit->schedule() != &parts.units.front()->schedule()) {
      return "the model is sharded over several groups of ranks. Shard all of it over one.";
    }
  }
  return "";
}

/// What stands in the way of capturing this call, though not of all others.
std::string CapturedStep::Impl::present_objection() const {
  const bool holds_gradients =
      std::any_of(parts.units.begin(), parts.units.end(), [](const auto& unit) {
        return unit->schedule().holds_gradients();
      });
  if (holds_gradients) {
    return "gradients of earlier backwards without synchronisation are still waiting. Make all micro-batches of a step in one call.";
  }
  return "";
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
  engine::refuse_in_recording(
      kCapturedStep,
      "Call one captured step after the other, or combine them into one.");
  replayed = false;
  if (device == nullptr) {
    eager_reason = "this device cannot record steps.";
    return function(given);
  }
  if (!parts.units.empty()) {
    seed_per_rank(); // the touch of a unit does, and a replay touches none
  }
  const std::vector<at::Tensor> inputs = on_device(given);
  ++num_calls;
  if (ranks && ddp::is_any_join_open()) {
    return run_eagerly(
        inputs,
        is_warming_up()
            ? ""
            : "a Join is open, and a rank without inputs cannot take part in a captured step.");
  }
  Kind& kind = find_kind(inputs);
  const Decision agreed = agree_on(decide(kind), kind);
  if (agreed.action == Action::Run) {
    return run_eagerly(inputs, agreed.reason);
  }
  train::RecordedStep* recorded =
      agreed.action == Action::Record ? capture(kind, inputs) : kind.current();
  return recorded != nullptr ? replay(*recorded, inputs)
                             : run_eagerly(inputs, kind.reason);
}

/// Graphs that cannot be replayed any more are dropped.
Kind& CapturedStep::Impl::find_kind(const std::vector<at::Tensor>& inputs) {
  constexpr size_t kMostKinds = 1000; // with those that are not captured
  if (kinds.size() >= kMostKinds) {
    std::erase_if(
        kinds, [](const auto& entry) { return entry.second.recorded.empty(); });
  }
  if (const uint64_t now = train::places_of(parts); now != places) {
    kinds.clear();
    places = now;
  }
  if (device->epoch() != epoch) { // attempts count all the same
    for (auto& [name, kind] : kinds) {
      kind.recorded.clear();
    }
    epoch = device->epoch();
  }
  Kind& kind = kinds[train::kind_of_step(parts, inputs)];
  std::erase_if(kind.recorded, [](const auto& step) { return !step->lives(); });
  return kind;
}

/// What this rank would do.
CapturedStep::Impl::Decision CapturedStep::Impl::decide(
    const Kind& kind) const {
  if (is_warming_up()) {
    return {};
  }
  if (std::string reason = objection.empty() ? present_objection() : objection;
      !reason.empty()) {
    return {Action::Run, std::move(reason)};
  }
  if (kind.current() != nullptr) {
    return {Action::Replay};
  }
  return kind.attempts < kAttempts ? Decision{Action::Record}
                                   : Decision{Action::Run, kind.reason};
}

/// What all ranks do: see [Note: captured steps]. Collective.
CapturedStep::Impl::Decision CapturedStep::Impl::agree_on(
    Decision mine,
    const Kind& kind) const {
  if (!ranks) {
    return mine;
  }
  const auto collectives = mine.action == Action::Replay
      ? static_cast<int64_t>(kind.current()->collectives)
      : 0;
  const at::Tensor most = at::empty({4}, at::kLong);
  auto* values = most.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(mine.action);
  values[1] = is_warming_up() ? 1 : 0;
  values[2] = collectives;
  values[3] = ~collectives;
  ranks->all_reduce(most, ReduceOp::Max, kCapturedStep);
  const auto action = static_cast<Action>(values[0]);
  const bool is_any_warming_up = values[1] != 0;
  if (action == Action::Replay && values[2] != ~values[3]) {
    return {Action::Record}; // anew, and alike
  }
  if (is_any_warming_up) {
    return {};
  }
  if (action == Action::Run && mine.action != Action::Run) {
    return {Action::Run, "another rank cannot capture its part of the step."};
  }
  return {action, std::move(mine.reason)};
}

/// `reason` is empty for a step that is not meant to be captured yet.
at::Tensor CapturedStep::Impl::run_eagerly(
    const std::vector<at::Tensor>& inputs,
    const std::string& reason) {
  if (!reason.empty() && options.require_capture()) {
    raise({.call = kCapturedStep}, "the step cannot be captured: " + reason);
  }
  if (!reason.empty() && warned_of.insert(reason).second) {
    TORCH_WARN(
        "CapturedStep cannot capture this step and runs it eagerly, which is slower: ",
        reason);
  }
  eager_reason =
      reason.empty() ? "steps before the first capture run eagerly." : reason;
  const OrdersOfSteps foreseen(parts.units, orders);
  if (!objection.empty()) { // for good: a plain step
    at::Tensor output;
    device->on_recording_stream([&] { output = function(inputs); });
    return output;
  }
  const auto before = train::rates_of(parts.optimizers);
  at::Tensor output;
  {
    const train::DeviceRates::Scope on_device(rates);
    device->on_recording_stream([&] {
      train::run_backwards_here(parts);
      output = function(inputs);
    });
  }
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
    Kind& kind,
    const std::vector<at::Tensor>& inputs) {
  const ChecksPaused paused(parts.units);
  const OrdersOfSteps foreseen(parts.units, orders);
  const train::EffectsWatch watch(parts);
  const train::RecordedStep* const old = kind.current(); // if others need one
  std::unique_ptr<train::RecordedStep> recorded;
  kind.reason.clear();
  train::HostParts host_parts;
  auto give_up = c10::make_scope_exit([&] {
    recorded = nullptr;
    kind.attempts += old == nullptr ? 1 : 0;
    for (const auto& entry : host_parts) {
      if (entry.part.lives()) {
        entry.part.forget();
      }
    }
    watch.undo();
  });
  try {
    recorded = train::record_step(
        {parts, *device, rates, function}, inputs, host_parts);
    recorded->effects = watch.finish();
    recorded->last_use = num_calls;
  } catch (const std::exception& error) {
    recorded = nullptr;
    kind.reason = train::text_of(error);
  }
  if (ranks) {
    kind.reason = agree_on_capture(recorded.get(), kind.reason);
  }
  if (!kind.reason.empty()) {
    return nullptr;
  }
  give_up.release();
  kind.attempts = 0;
  std::erase_if(
      kind.recorded, [old](const auto& step) { return step.get() == old; });
  kind.recorded.push_back(std::move(recorded));
  train::RecordedStep* result = kind.recorded.back().get();
  forget_oldest();
  note_capture();
  return result;
}

/// Every rank has captured the same collectives, or none has captured anything
/// and the result says why. Collective.
std::string CapturedStep::Impl::agree_on_capture(
    const train::RecordedStep* recorded,
    const std::string& reason) const {
  const auto failures = comm::share_failures(
      *ranks,
      recorded != nullptr ? std::nullopt : std::optional<std::string>(reason),
      kCapturedStep);
  if (!failures.empty()) {
    const auto& [rank, text] = *failures.begin();
    return fmt::format("on rank {}: {}", rank, text);
  }
  const at::Tensor most = at::empty({2}, at::kLong);
  auto* values = most.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(recorded->collectives);
  values[1] = ~values[0];
  ranks->all_reduce(most, ReduceOp::Max, kCapturedStep);
  return values[0] == ~values[1]
      ? ""
      : "the ranks captured different collectives. Every rank must make the same forwards, backwards and exchanges in each call.";
}

void CapturedStep::Impl::note_capture() {
  constexpr int64_t kMany = 4; // for each graph that may be kept
  if (++num_captures == kMany * options.max_graphs()) {
    TORCH_WARN(
        "CapturedStep has captured ",
        num_captures,
        " steps and keeps ",
        options.max_graphs(),
        ": capturing takes longer than an eager step. Pad batches to a few shapes, or raise max_graphs.");
  }
}

void CapturedStep::Impl::forget_oldest() {
  if (num_recorded() <= static_cast<size_t>(options.max_graphs())) {
    return;
  }
  Kind* oldest_of = nullptr;
  size_t oldest = 0;
  int64_t last_use = std::numeric_limits<int64_t>::max();
  for (auto& [name, kind] : kinds) {
    for (size_t i = 0; i < kind.recorded.size(); ++i) {
      if (kind.recorded[i]->last_use < last_use) {
        last_use = kind.recorded[i]->last_use;
        oldest_of = &kind;
        oldest = i;
      }
    }
  }
  oldest_of->recorded.erase(
      oldest_of->recorded.begin() + static_cast<std::ptrdiff_t>(oldest));
}

size_t CapturedStep::Impl::num_recorded() const {
  size_t sum = 0;
  for (const auto& [name, kind] : kinds) {
    sum += kind.recorded.size();
  }
  return sum;
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
  return impl_->num_recorded();
}

} // namespace tessera
