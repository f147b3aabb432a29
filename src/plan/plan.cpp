#include "plan/plan.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "plan/checked.h"
#include "plan/rank.h"
#include "plan/step_program.h"
#include "plan/unit_sizes.h"

namespace tessera::plan {
namespace {

/// In the first step there is no optimizer state and no gather is started
/// ahead; in the second, buffers are allocated that the third finds in the
/// pool.
constexpr int kSteps = 3;

/// Forwards and backwards of a step. Those in the middle are all alike, so one
/// of them stands for all.
void walk_step(
    const Program& program,
    const TrainingSetup& setup,
    Rank& rank,
    Account& account,
    Plan& plan) {
  plan.at_rest = account.device.now();
  const int64_t walked = std::min<int64_t>(setup.accumulate, 3);
  for (int64_t i = 0; i < walked; ++i) {
    const bool is_last = i + 1 == walked;
    const int64_t repeats = i == 1 && !is_last ? setup.accumulate - 2 : 1;
    account.wire.set_repeats(repeats);
    const StepTime before = account.clock.time();
    plan.before_forward = account.device.now();
    rank.begin_forward();
    program.forward(rank, account);
    plan.after_forward = account.device.now();
    rank.begin_backward(setup.syncs_always || is_last);
    program.backward(rank, account);
    rank.end_backward();
    account.clock.repeat_since(before, repeats - 1);
    plan.after_backward = account.device.now();
  }
  account.wire.set_repeats(1);
  rank.step();
}

/// "blocks." for "blocks.7"; empty for a unit that is not an element of a list.
std::string_view list_of(std::string_view unit) {
  const size_t end = unit.find_last_not_of("0123456789") + 1;
  return end < unit.size() ? unit.substr(0, end) : std::string_view();
}

std::vector<UnitLine> lines_of(const Model& model, const TrainingSetup& setup) {
  const auto sizes = sizes_of(model, setup);
  const bool is_whole = setup.engine != Engine::Sharded;
  std::vector<UnitLine> lines;
  const NamedUnit* before = nullptr;
  for (const NamedUnit& unit : model.units) {
    const bool goes_on = before != nullptr && before->kind == unit.kind &&
        !list_of(unit.name).empty() &&
        list_of(before->name) == list_of(unit.name);
    before = &unit;
    if (goes_on) {
      lines.back().last = unit.name;
      ++lines.back().count;
      continue;
    }
    lines.push_back(
        {.name = unit.name,
         .last = {},
         .count = 1,
         .numel = model.kinds[unit.kind].numel(),
         .shard_bytes =
             is_whole ? sizes[unit.kind].own() : sizes[unit.kind].shard(),
         .full_bytes = is_whole ? 0 : sizes[unit.kind].full()});
  }
  return lines;
}

Plan walk(
    const Model& model,
    const Program& program,
    const TrainingSetup& setup) {
  Account account{.clock = Clock(setup.speeds)};
  const auto rank = make_rank(model, setup, account);
  Plan plan;
  for (int step = 0; step < kSteps; ++step) {
    account.device.reset_peak();
    account.host.reset_peak();
    account.wire.reset();
    account.clock.reset();
    walk_step(program, setup, *rank, account, plan);
  }
  plan.description = model.description;
  plan.numel = model.numel();
  plan.num_params = model.num_params();
  plan.device = {account.device.peak(), account.device.highest()};
  plan.host = {account.host.peak(), account.host.highest()};
  plan.wire = account.wire;
  plan.time = account.clock.time();
  plan.units = lines_of(model, setup);
  return plan;
}

Plan plan_of(const GptSubject& subject, const TrainingSetup& setup) {
  const Model model = model_of(subject.shape);
  const format::DType stored = setup.dtype.value_or(format::DType::Float32);
  const GptProgram program(
      subject.shape,
      subject.run,
      setup.param_dtype.value_or(stored),
      setup.device);
  return walk(model, program, setup);
}

Plan plan_of(const ModelSubject& subject, const TrainingSetup& setup) {
  const UnitsProgram program(
      subject.model, subject.activation_bytes.value_or(0), subject.tokens);
  Plan plan = walk(subject.model, program, setup);
  plan.knows_activations = subject.activation_bytes.has_value();
  return plan;
}

Plan plan_of(const ProgramSubject& subject, const TrainingSetup& setup) {
  Walk of_step = walk_of(subject.run, setup.device);
  Model model = subject.model;
  model.buffer_bytes = plus(model.buffer_bytes, of_step.constant_bytes);
  const std::vector<std::string> unknown(
      of_step.unknown.begin(), of_step.unknown.end());
  Plan plan = walk(model, ExportedProgram(std::move(of_step)), setup);
  plan.unknown_operators = unknown;
  return plan;
}

} // namespace

Plan make_plan(const Subject& subject, const TrainingSetup& setup) {
  check(setup);
  return std::visit(
      [&](const auto& one) { return plan_of(one, setup); }, subject);
}

} // namespace tessera::plan
