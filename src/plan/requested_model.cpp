#include "plan/requested_model.h"

#include <optional>
#include <utility>

#include "base/text.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/format_error.h"
#include "plan/checked.h"
#include "plan/checkpoint_model.h"

namespace tessera::plan {
namespace {

using Notes = std::vector<std::string>;

constexpr int64_t kUsualHeadSize = 64;

bool has_shape_flags(const Request& request) {
  return request.layers || request.width || request.heads ||
      request.vocabulary || request.tied || request.untied ||
      request.split_root || request.chunked_loss;
}

/// What can be said of a GPT and of a program.
bool has_run_flags(const Request& request) {
  return request.length || request.batch || request.recompute ||
      request.loss_dtype;
}

void check_gpt_flags(const Request& request) {
  if (request.activation_bytes || !request.grouping.select.empty() ||
      !request.grouping.unit.empty()) {
    throw PlanError(
        "--activations, --select and --unit belong to a checkpoint, and none was given.");
  }
  if (!request.layers || !request.width) {
    throw PlanError(
        "no model: give a checkpoint, or --layers and --width of a GPT.");
  }
  if (request.tied && request.untied) {
    throw PlanError("--tied and --untied exclude each other.");
  }
  if (request.split_root && !request.untied) {
    throw PlanError(
        "--split-root needs --untied: a tied embedding is also the output layer and stays in the root.");
  }
  if (request.chunked_loss && request.loss_dtype) {
    throw PlanError(
        "--loss-dtype is of a loss that holds all logits; a --chunked-loss has dtypes of its own. Leave out one of them.");
  }
  if (!request.heads && *request.width % kUsualHeadSize != 0) {
    throw PlanError(
        "width " + std::to_string(*request.width) +
        " is not a multiple of 64, the usual size of a head. Give --heads.");
  }
}

/// The value of a flag, or the usual one with a note.
int64_t value_or_usual(
    const std::optional<int64_t>& given,
    int64_t usual,
    const char* flag,
    Notes& notes) {
  if (!given) {
    notes.push_back(std::string(flag) + " " + std::to_string(usual));
  }
  return given.value_or(usual);
}

GptSubject gpt_of(const Request& request, Notes& notes) {
  check_gpt_flags(request);
  GptSubject subject;
  GptShape& shape = subject.shape;
  shape.layers = *request.layers;
  shape.width = *request.width;
  shape.is_tied = !request.untied;
  shape.splits_root = request.split_root;
  shape.heads = value_or_usual(
      request.heads, *request.width / kUsualHeadSize, "--heads", notes);
  shape.vocabulary =
      value_or_usual(request.vocabulary, 50257, "--vocabulary", notes);
  shape.length = value_or_usual(request.length, 1024, "--length", notes);
  subject.run.batch = value_or_usual(request.batch, 1, "--batch", notes);
  subject.run.recomputes = request.recompute;
  subject.run.chunks_loss = request.chunked_loss;
  subject.run.loss_dtype = request.loss_dtype.value_or(format::DType::Float32);
  if (request.tokens) {
    throw PlanError(
        "--tokens belongs to a checkpoint; a GPT has --batch sequences of --length tokens.");
  }
  if (!request.loss_dtype && !request.chunked_loss) {
    notes.emplace_back("--loss-dtype float32: the loss is computed in float32");
  }
  if (!request.tied && !request.untied) {
    notes.emplace_back("--tied: the embedding is also the output layer");
  }
  check(shape);
  return subject;
}

void note_model(
    const Request& request,
    const CheckpointModel& found,
    Notes& notes) {
  if (found.num_left_out > 0) {
    const std::string& select = request.grouping.select;
    notes.push_back(
        count_text(found.num_left_out, "tensor") +
        " of the checkpoint left out: not below " +
        format::in_quotes(select.empty() ? "model" : select));
  }
  if (found.num_buffers > 0) {
    notes.push_back(
        count_text(found.num_buffers, "tensor") +
        " without gradient: whole on every rank, as buffers");
  }
  if (found.num_tied > 0) {
    notes.push_back(
        count_text(found.num_tied, "tensor") +
        " tied to another one: counted once");
  }
  notes.emplace_back(
      request.grouping.unit.empty()
          ? "units: each module of a numbered list (blocks.7); the rest is the root"
          : "units: what --unit finds; the rest is the root");
}

/// What a run of the program takes for granted.
void note_run(
    const Request& request,
    const ProgramRun& run,
    const Walk& walk,
    Notes& notes) {
  const InputSizes chosen = GraphSizes(*run.program, run.sizes).chosen();
  const auto note_size = [&](const char* flag, const auto& wanted, auto size) {
    if (!wanted && size) {
      notes.push_back(
          std::string(flag) + " " + std::to_string(*size) +
          ": the sample of the export");
    }
  };
  note_size("--batch", request.batch, chosen.batch);
  note_size("--length", request.length, chosen.length);
  if (!chosen.batch && !chosen.length) {
    notes.emplace_back("inputs: of the sizes that they were exported with");
  }
  if (walk.loss.empty()) {
    notes.emplace_back("no result has a gradient: a forward, and no backward");
  } else if (walk.is_loss) {
    notes.push_back(
        "the loss: the result " + format::in_quotes(walk.loss) +
        ", which is one number");
  } else {
    notes.push_back(
        "the loss: a cross-entropy of the result " +
        format::in_quotes(walk.loss) + ", in " +
        std::string(format::info(run.loss_dtype).torch_name) +
        "; other results have no gradient");
  }
  if (request.param_dtype) {
    notes.emplace_back(
        "activations: in the dtypes of the export, which --param-dtype does not change");
  }
  if (!walk.unknown.empty()) {
    std::string names;
    for (const std::string& name : walk.unknown) {
      names += (names.empty() ? "" : ", ") + format::in_quotes(name);
    }
    notes.push_back(
        "operators without a rule, whose results are taken for saved: " +
        names);
  }
}

/// The model with its program, or nothing if sizes depend on data.
std::optional<ProgramSubject> program_of(
    const Request& request,
    const CheckpointModel& found,
    Notes& notes) {
  ProgramSubject subject{
      .model = found.model,
      .run = {
          .program = read_training_program(request.checkpoint),
          .params = found.places,
          .sizes = {.batch = request.batch, .length = request.length},
          .recomputes = request.recompute,
          .loss_dtype = request.loss_dtype.value_or(format::DType::Float32)}};
  try {
    const Walk walk = walk_of(
        subject.run, request.device == "cpu" ? Device::Cpu : Device::Cuda);
    note_run(request, subject.run, walk, notes);
  } catch (const exported::UnknownSize& error) {
    if (has_run_flags(request)) {
      throw PlanError(
          std::string("activations cannot be planned: ") + error.what() +
          ". Leave out --batch, --length, --recompute and --loss-dtype, and give --activations BYTES.");
    }
    notes.push_back(
        std::string("activations: not known, since ") + error.what() +
        "; give --activations BYTES");
    return std::nullopt;
  }
  if (request.tokens) {
    throw PlanError(
        "--tokens: the program itself tells how much is computed. Leave it out, or give --activations BYTES, which takes the program's place.");
  }
  if (request.tflops) {
    notes.emplace_back("time: products of matrices and convolutions");
  }
  return subject;
}

[[noreturn]] void refuse_gpt_flags() {
  throw PlanError(
      "the checkpoint determines the model's shape; leave out the flags of a GPT (--layers, --batch, --recompute, ...). An exported program takes --batch, --length, --recompute and --loss-dtype, unless --activations is given.");
}

Subject checkpoint_of(const Request& request, Notes& notes) {
  if (has_shape_flags(request)) {
    refuse_gpt_flags();
  }
  const auto source = checkpoint::Source::open(request.checkpoint);
  const bool has_program = source->format() == checkpoint::Format::Exported &&
      !request.activation_bytes;
  if (has_run_flags(request) && !has_program) {
    refuse_gpt_flags();
  }
  CheckpointModel found = model_of(*source, request.grouping);
  if (!has_program && !request.activation_bytes) {
    notes.emplace_back(
        "activations: not known from a checkpoint; give --activations BYTES");
  }
  note_model(request, found, notes);
  if (has_program) {
    if (auto subject = program_of(request, found, notes)) {
      return *std::move(subject);
    }
  }
  if (request.tflops && !request.tokens) {
    throw PlanError(
        "--tflops: a checkpoint does not tell how much is computed. Give --tokens N, the tokens per rank per backward.");
  }
  if (request.tokens) {
    notes.emplace_back(
        "time: each parameter is multiplied once for each token in forward; attention is not counted; the root's gradients come first in backward");
  }
  return ModelSubject{
      .model = std::move(found.model),
      .activation_bytes = request.activation_bytes,
      .tokens = request.tokens.value_or(0)};
}

} // namespace

Subject subject_of(const Request& request, Notes& notes) {
  if (request.checkpoint.empty()) {
    return gpt_of(request, notes);
  }
  return checkpoint_of(request, notes);
}

} // namespace tessera::plan
