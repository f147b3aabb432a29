#include "plan/answer.h"

#include <variant>

#include "plan/checked.h"
#include "plan/fit.h"
#include "plan/requested_model.h"
#include "plan/requested_setup.h"

namespace tessera::plan {
namespace {

void note_setup(const TrainingSetup& setup, std::vector<std::string>& notes) {
  if (setup.engine == Engine::Sharded) {
    notes.emplace_back(
        "the third step or later: units are gathered ahead, the optimizer has state; fully_shard's padding");
  } else {
    notes.emplace_back(
        "buckets of 1 MB, then 25 MB, the defaults of DDPOptions");
  }
  if (setup.speeds.are_known()) {
    notes.emplace_back(
        "time: matrix products and collectives, one collective at a time; no optimizer, no other operators");
    notes.emplace_back(
        "the time of a collective: --latency, and what a rank sends at --bandwidth");
  }
  notes.emplace_back(
      "the loop is forward, backward, step, zero_grad: no gradients in forward");
  notes.emplace_back(
      "not counted: the model before it is sharded, buffers of NCCL, Gloo and shared memory, and memory that the allocator keeps or wastes");
}

/// The largest batch, or the largest GPT, that fits.
void grow(
    const GptSubject& subject,
    const TrainingSetup& setup,
    const std::string& what,
    FitAnswer& fit) {
  const Limit limit{fit.limit_bytes};
  fit.grows = what;
  if (what == "batch") {
    fit.largest = largest_batch(subject, setup, limit);
    return;
  }
  const Grows grows = what == "layers" ? Grows::Layers : Grows::Width;
  if (const auto shape = largest_gpt(subject, setup, limit, grows)) {
    fit.largest = grows == Grows::Layers ? shape->layers : shape->width;
    fit.largest_numel = model_of(*shape).numel();
  }
}

FitAnswer fit_of(
    const Request& request,
    const Subject& subject,
    const TrainingSetup& setup,
    const Plan& plan) {
  const Limit limit{*request.memory_bytes};
  FitAnswer fit{
      .limit_bytes = limit.bytes,
      .fits = plan.device.at_peak.total() <= limit.bytes,
      .smallest_world = smallest_world(subject, setup, limit)};
  const auto* program = std::get_if<ProgramSubject>(&subject);
  const bool has_batch = program != nullptr &&
      GraphSizes(*program->run.program, program->run.sizes).chosen().batch;
  if (const auto* gpt = std::get_if<GptSubject>(&subject)) {
    grow(*gpt, setup, request.largest.value_or("batch"), fit);
  } else if (has_batch && request.largest.value_or("batch") == "batch") {
    fit.grows = "batch";
    fit.largest = largest_batch(*program, setup, limit);
  } else if (request.largest) {
    throw PlanError(
        "--largest varies the size of a GPT given by flags, or the batch of a program that was exported for any; the size of a checkpoint's model is fixed.");
  }
  if (!fit.fits) {
    fit.suggestions =
        suggestions_for(request, subject, limit, fit.smallest_world);
  }
  return fit;
}

} // namespace

Answer answer(const Request& request) {
  if (request.largest && !request.memory_bytes) {
    throw PlanError("--largest needs --memory BYTES to fit into.");
  }
  Answer result;
  result.strategy = strategy_of(request);
  result.setup = setup_of(request);
  const Subject subject = subject_of(request, result.notes);
  note_setup(result.setup, result.notes);
  result.plan = make_plan(subject, result.setup);
  if (request.memory_bytes) {
    result.fit = fit_of(request, subject, result.setup, result.plan);
  }
  return result;
}

} // namespace tessera::plan
