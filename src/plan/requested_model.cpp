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

bool has_gpt_flags(const Request& request) {
  return request.layers || request.width || request.heads ||
      request.vocabulary || request.length || request.batch || request.tied ||
      request.untied || request.split_root || request.recompute ||
      request.chunked_loss || request.loss_dtype;
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

ModelSubject checkpoint_of(const Request& request, Notes& notes) {
  if (has_gpt_flags(request)) {
    throw PlanError(
        "the checkpoint determines the model's shape; leave out the flags of a GPT (--layers, --batch, --recompute, ...).");
  }
  const auto source = checkpoint::Source::open(request.checkpoint);
  CheckpointModel found = model_of(*source, request.grouping);
  if (!request.activation_bytes) {
    notes.emplace_back(
        "activations: not known from a checkpoint; give --activations BYTES");
  }
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
  if (request.tflops && !request.tokens) {
    throw PlanError(
        "--tflops: a checkpoint does not tell how much is computed. Give --tokens N, the tokens per rank per backward.");
  }
  if (request.tokens) {
    notes.emplace_back(
        "time: each parameter is multiplied once for each token in forward; attention is not counted; the root's gradients come first in backward");
  }
  return {
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
