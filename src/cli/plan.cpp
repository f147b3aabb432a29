// `tessera plan`: memory, traffic and time of a training run, before it starts.
#include <CLI/CLI.hpp>

#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/format/dtype.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "cli/commands.h"
#include "cli/plan_json.h"
#include "cli/plan_text.h"
#include "plan/answer.h"
#include "plan/checked.h"

namespace tessera::cli {
namespace {

using format::DType;
using plan::PlanError;

constexpr int kError = 2;

const std::map<std::string, DType> kDtypes{
    {"float32", DType::Float32},
    {"fp32", DType::Float32},
    {"bfloat16", DType::BFloat16},
    {"bf16", DType::BFloat16},
    {"float16", DType::Float16},
    {"fp16", DType::Float16},
    {"float64", DType::Float64},
    {"fp64", DType::Float64}};

const std::map<std::string, plan::Optimizer> kOptimizers{
    {"adamw", plan::Optimizer::AdamW},
    {"sgd", plan::Optimizer::Sgd},
    {"sgd-momentum", plan::Optimizer::SgdMomentum},
    {"adagrad", plan::Optimizer::Adagrad},
    {"rmsprop", plan::Optimizer::RmsProp},
    {"none", plan::Optimizer::None}};

/// The request, and what only the command line knows.
struct Settings {
  plan::Request request;
  std::string activations; // bytes, as text
  std::string memory; // bytes, as text
  std::string overlap; // bytes, as text
  std::string bandwidth; // bytes per second, as text
  bool json = false;
};

int64_t parse_size(const char* flag, const std::string& text) {
  const uint64_t bytes = checkpoint::parse_bytes(text);
  if (bytes > INT64_MAX) {
    throw PlanError(
        std::string(flag) + " " + text + " is more than 9.2 exabytes.");
  }
  return static_cast<int64_t>(bytes);
}

int print_plan(Settings settings) {
  if (!settings.activations.empty()) {
    settings.request.activation_bytes =
        parse_size("--activations", settings.activations);
  }
  if (!settings.memory.empty()) {
    settings.request.memory_bytes = parse_size("--memory", settings.memory);
  }
  if (!settings.overlap.empty()) {
    settings.request.overlap_bytes = settings.overlap == "0"
        ? 0 // not a size elsewhere
        : parse_size("--overlap-bytes", settings.overlap);
  }
  if (!settings.bandwidth.empty()) {
    settings.request.bandwidth = parse_size("--bandwidth", settings.bandwidth);
  }
  const plan::Answer answer = plan::answer(settings.request);
  std::cout
      << (settings.json ? plan_json(answer)
                        : plan_text(answer, Style::of_standard_output()));
  return answer.fit && !answer.fit->fits ? 1 : 0;
}

void add_dtype(
    CLI::App& command,
    const std::string& name,
    std::optional<DType>& target,
    const std::string& help) {
  command
      .add_option_function<std::string>(
          name,
          [&target](const std::string& text) { target = kDtypes.at(text); },
          help)
      ->check(CLI::IsMember(kDtypes))
      ->type_name("DTYPE");
}

void add_model_flags(CLI::App& command, Settings& settings) {
  plan::Request& request = settings.request;
  command.add_option(
      "CHECKPOINT",
      request.checkpoint,
      "Checkpoint of any format; without it, describe a GPT by flags");
  const std::string of_checkpoint = "Checkpoint";
  command
      .add_option(
          "--select",
          request.grouping.select,
          "Only names below this one (default: model, if the checkpoint\nalso has optimizer state)")
      ->group(of_checkpoint);
  command
      .add_option(
          "--unit",
          request.grouping.unit,
          "Regular expression: names with the same match form a unit")
      ->type_name("REGEX")
      ->group(of_checkpoint);
  command
      .add_option(
          "--activations",
          settings.activations,
          "Memory saved for backward, per rank; an exported program\ntells it")
      ->type_name("BYTES")
      ->group(of_checkpoint);
  command
      .add_option(
          "--tokens",
          request.tokens,
          "Tokens per rank per backward, for the time of a step")
      ->check(CLI::PositiveNumber)
      ->group(of_checkpoint);
  const std::string of_gpt = "GPT";
  const std::string of_both = "GPT, or an exported program";
  const auto add = [&](const char* name, auto& target, const char* help) {
    command.add_option(name, target, help)->group(of_gpt);
  };
  add("--layers", request.layers, "Number of blocks");
  add("--width", request.width, "Width of the hidden states");
  add("--heads", request.heads, "Attention heads; default: width / 64");
  add("--vocabulary", request.vocabulary, "Number of tokens; default: 50257");
  command
      .add_option(
          "--length",
          request.length,
          "Length of a sequence; default: 1024, or the export's")
      ->group(of_both);
  command
      .add_option(
          "--batch",
          request.batch,
          "Sequences per rank per backward; default: 1, or the export's")
      ->group(of_both);
  command
      .add_flag(
          "--tied",
          request.tied,
          "The embedding is also the output layer (default)")
      ->group(of_gpt);
  command
      .add_flag(
          "--untied", request.untied, "The output layer has its own weight")
      ->group(of_gpt);
  command
      .add_flag(
          "--split-root",
          request.split_root,
          "The embedding and the output layer are units of their own")
      ->group(of_gpt);
  command
      .add_flag(
          "--recompute", request.recompute, "Each block under recompute()")
      ->group(of_both);
  command
      .add_flag(
          "--chunked-loss",
          request.chunked_loss,
          "The loss by linear_cross_entropy(), which never holds all logits")
      ->group(of_gpt);
  add_dtype(
      command,
      "--loss-dtype",
      request.loss_dtype,
      "Logits are cast to this dtype (default: float32)");
  command.get_option("--loss-dtype")->group(of_both);
}

void add_setup_flags(CLI::App& command, plan::Request& request) {
  command.add_option("-n,--world", request.world, "Ranks (default 1)");
  command.add_option("--mesh", request.mesh, "Hybrid: copies x shards, 8x2048");
  command
      .add_option(
          "--strategy",
          request.strategy,
          "full_shard or fsdp (default), shard_grad_op, no_shard, hybrid, ddp, zero")
      ->check(CLI::IsMember(
          {"full_shard",
           "fsdp",
           "shard_grad_op",
           "no_shard",
           "hybrid",
           "ddp",
           "zero"}));
  command.add_option("--layout", request.layout, "flat (default) or dim0")
      ->check(CLI::IsMember({"flat", "dim0"}));
  command.add_option(
      "--reshard-after-forward",
      request.reshard_after_forward,
      "true or false; default: depends on the strategy");
  add_dtype(
      command,
      "--dtype",
      request.dtype,
      "Shards; default: float32, or the checkpoint's dtype");
  add_dtype(
      command,
      "--param-dtype",
      request.param_dtype,
      "Full parameters and activations; default: the shards' dtype");
  add_dtype(
      command,
      "--reduce-dtype",
      request.reduce_dtype,
      "Gradients on the wire; default: the shards' dtype");
  command.add_flag(
      "--keep-cast-shards",
      request.keep_cast_shards,
      "Shards in --param-dtype too: cast once per step, not per gather");
  command
      .add_option_function<std::string>(
          "--optimizer",
          [&request](const std::string& name) {
            request.optimizer = kOptimizers.at(name);
          },
          "adamw (default), sgd, sgd-momentum, adagrad, rmsprop, none")
      ->check(CLI::IsMember(kOptimizers));
  command.add_option(
      "--accumulate", request.accumulate, "Backwards per step (default 1)");
  command.add_flag(
      "--no-sync", request.no_sync, "Only the last backward of a step reduces");
  command.add_flag(
      "--offload",
      request.offload,
      "Keep shards, their gradients and optimizer state in host memory");
  command.add_option("--device", request.device, "cpu (default) or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

void add_speed_flags(CLI::App& command, Settings& settings) {
  const std::string speeds = "Time of a step";
  command
      .add_option(
          "--tflops",
          settings.request.tflops,
          "What a rank computes: 10^12 operations per second")
      ->group(speeds);
  command
      .add_option(
          "--bandwidth",
          settings.bandwidth,
          "What a rank sends, and receives, per second: 50GB, ...")
      ->type_name("BYTES")
      ->group(speeds);
  command
      .add_option(
          "--latency",
          settings.request.latency_us,
          "Latency of a collective, in microseconds (default 0)")
      ->group(speeds);
}

} // namespace

Action add_plan(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "plan",
      "Memory, traffic and time of a run before it starts, and what fits");
  add_model_flags(*command, *settings);
  add_setup_flags(*command, settings->request);
  add_speed_flags(*command, *settings);
  command
      ->add_option(
          "--memory", settings->memory, "Memory of a rank's device: 80GB, ...")
      ->type_name("BYTES");
  command
      ->add_option(
          "--overlap-bytes",
          settings->overlap,
          "For gathers ahead, and as much for reductions; default: by device")
      ->type_name("BYTES");
  command
      ->add_option(
          "--largest",
          settings->request.largest,
          "GPT, with --memory: batch (default), layers or width")
      ->check(CLI::IsMember({"batch", "layers", "width"}));
  command->add_flag("--json", settings->json, "Print JSON");
  command->footer(
      "Exit code: 0 planned, 1 does not fit into --memory, 2 cannot be planned.\n"
      "Example: tessera plan --layers 48 --width 6144 --world 64 --memory 80GB\n"
      "           --param-dtype bf16 --recompute --device cuda");
  return [settings] {
    try {
      return print_plan(*settings);
    } catch (const std::exception& error) {
      std::cerr << "tessera plan: " << error.what() << "\n";
      return kError;
    }
  };
}

} // namespace tessera::cli
