// `tessera plan`: what a training run takes, before it is started.
#include "plan/plan.h"

#include <CLI/CLI.hpp>

#include <charconv>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/error.h"
#include "checkpoint/tools/text.h"
#include "cli/commands.h"
#include "cli/plan_report.h"
#include "plan/checked.h"
#include "plan/checkpoint_model.h"
#include "plan/fit.h"

namespace tessera::cli {
namespace {

using format::DType;
using plan::Engine;
using plan::GptSubject;
using plan::ModelSubject;
using plan::PlanError;
using plan::TrainingSetup;

constexpr int kError = 2;

const std::map<std::string, DType> kDtypes{
    {"float32", DType::kFloat32},
    {"fp32", DType::kFloat32},
    {"bfloat16", DType::kBFloat16},
    {"bf16", DType::kBFloat16},
    {"float16", DType::kFloat16},
    {"fp16", DType::kFloat16},
    {"float64", DType::kFloat64},
    {"fp64", DType::kFloat64}};

const std::map<std::string, plan::Optimizer> kOptimizers{
    {"adamw", plan::Optimizer::AdamW},
    {"sgd", plan::Optimizer::Sgd},
    {"sgd-momentum", plan::Optimizer::SgdMomentum},
    {"adagrad", plan::Optimizer::Adagrad},
    {"rmsprop", plan::Optimizer::RmsProp},
    {"none", plan::Optimizer::None}};

/// As the command line has them.
struct Settings {
  // The model.
  std::string checkpoint;
  plan::CheckpointOptions grouping;
  std::string activations; // bytes
  std::optional<int64_t> layers;
  std::optional<int64_t> width;
  std::optional<int64_t> heads;
  std::optional<int64_t> vocabulary;
  std::optional<int64_t> length;
  std::optional<int64_t> batch;
  bool tied = false;
  bool untied = false;
  bool recompute = false;
  std::optional<DType> loss_dtype;
  // The set-up.
  std::optional<int64_t> world;
  std::string mesh;
  std::string strategy;
  std::optional<std::string> layout;
  std::optional<bool> reshard_after_forward;
  std::optional<DType> dtype;
  std::optional<DType> param_dtype;
  std::optional<DType> reduce_dtype;
  plan::Optimizer optimizer = plan::Optimizer::AdamW;
  int64_t accumulate = 1;
  bool no_sync = false;
  bool offload = false;
  std::string device = "cpu";
  // What is asked.
  std::string memory; // bytes
  std::optional<std::string> largest;
  bool json = false;

  bool has_gpt_flags() const {
    return layers || width || heads || vocabulary || length || batch || tied ||
        untied || recompute || loss_dtype;
  }
};

int64_t parse_size(const char* flag, const std::string& text) {
  const uint64_t bytes = checkpoint::parse_bytes(text);
  if (bytes > INT64_MAX) {
    throw PlanError(
        std::string(flag) + " " + text + " is more than 9.2 exabytes.");
  }
  return static_cast<int64_t>(bytes);
}

// ---- the ranks -------------------------------------------------------------

struct Grid {
  int64_t copies = 1;
  int64_t shards = 1;
};

/// "8x2048".
Grid parse_mesh(const std::string& text) {
  Grid grid;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, grid.copies);
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == 'x') {
    const auto second = std::from_chars(first.ptr + 1, end, grid.shards);
    if (second.ec == std::errc() && second.ptr == end) {
      return grid;
    }
  }
  throw PlanError(
      "--mesh " + format::in_quotes(text) +
      ": expected copies and the ranks that share each, such as 8x2048.");
}

std::string strategy_of(const Settings& settings) {
  if (settings.strategy == "fsdp") { // as the trainer calls it
    return "full_shard";
  }
  if (!settings.strategy.empty()) {
    return settings.strategy;
  }
  return settings.mesh.empty() ? "full_shard" : "hybrid";
}

void place_ranks(
    const Settings& settings,
    const std::string& strategy,
    TrainingSetup& setup) {
  if (settings.world && !settings.mesh.empty()) {
    throw PlanError(
        "--world and --mesh both say how many ranks there are. Give one of them.");
  }
  if (strategy == "hybrid") {
    if (settings.mesh.empty()) {
      throw PlanError(
          "hybrid sharding needs --mesh COPIESxSHARDS, such as 8x2048.");
    }
    const Grid grid = parse_mesh(settings.mesh);
    setup.copies = grid.copies;
    setup.shards = grid.shards;
    return;
  }
  if (!settings.mesh.empty()) {
    throw PlanError(
        "--mesh is for --strategy hybrid; " + strategy + " takes --world N.");
  }
  const bool is_sharded =
      strategy == "full_shard" || strategy == "shard_grad_op";
  (is_sharded ? setup.shards : setup.copies) = settings.world.value_or(1);
  setup.is_whole = strategy == "no_shard";
}

TrainingSetup setup_of(const Settings& settings, const std::string& strategy) {
  TrainingSetup setup{
      .engine = strategy == "ddp" ? Engine::Ddp
          : strategy == "zero"    ? Engine::Zero
                                  : Engine::Sharded,
      .layout = settings.layout == "dim0" ? engine::Layout::Kind::Dim0
                                          : engine::Layout::Kind::Flat,
      .dtype = settings.dtype,
      .param_dtype = settings.param_dtype,
      .reduce_dtype = settings.reduce_dtype,
      .optimizer = settings.optimizer,
      .accumulate = settings.accumulate,
      .syncs_always = !settings.no_sync,
      .offload = settings.offload,
      .device =
          settings.device == "cpu" ? plan::Device::Cpu : plan::Device::Cuda};
  if (setup.engine != Engine::Sharded &&
      (settings.layout || settings.reshard_after_forward)) {
    throw PlanError(
        "--layout and --reshard-after-forward belong to sharding; " + strategy +
        " trains whole copies without them.");
  }
  place_ranks(settings, strategy, setup);
  setup.reshard_after_forward =
      settings.reshard_after_forward.value_or(strategy != "shard_grad_op");
  if (strategy == "shard_grad_op" && setup.reshard_after_forward) {
    throw PlanError(
        "shard_grad_op keeps parameters after forward; with --reshard-after-forward true it is --strategy full_shard.");
  }
  if (settings.no_sync && settings.accumulate == 1) {
    throw PlanError(
        "--no-sync leaves out all backwards of a step but the last, and there is one. Give --accumulate N.");
  }
  check(setup);
  return setup;
}

// ---- the model -------------------------------------------------------------

/// Adds what was assumed to `notes`.
GptSubject gpt_of(const Settings& settings, std::vector<std::string>& notes) {
  if (!settings.activations.empty() || !settings.grouping.select.empty() ||
      !settings.grouping.unit.empty()) {
    throw PlanError(
        "--activations, --select and --unit belong to a checkpoint, and none was given.");
  }
  if (!settings.layers || !settings.width) {
    throw PlanError(
        "no model: give a checkpoint, or --layers and --width of a GPT.");
  }
  if (settings.tied && settings.untied) {
    throw PlanError("--tied and --untied exclude each other.");
  }
  constexpr int64_t kHeadSize = 64;
  GptSubject subject;
  subject.shape.layers = *settings.layers;
  subject.shape.width = *settings.width;
  subject.shape.is_tied = !settings.untied;
  if (!settings.heads && *settings.width % kHeadSize != 0) {
    throw PlanError(
        "width " + std::to_string(*settings.width) +
        " is no multiple of 64, the usual size of a head. Give --heads.");
  }
  const auto take = [&](int64_t& value,
                        const std::optional<int64_t>& given,
                        int64_t usual,
                        const std::string& name) {
    value = given.value_or(usual);
    if (!given) {
      notes.push_back("--" + name + " " + std::to_string(usual));
    }
  };
  take(
      subject.shape.heads,
      settings.heads,
      *settings.width / kHeadSize,
      "heads");
  take(subject.shape.vocabulary, settings.vocabulary, 50257, "vocabulary");
  take(subject.shape.length, settings.length, 1024, "length");
  take(subject.run.batch, settings.batch, 1, "batch");
  subject.run.recomputes = settings.recompute;
  subject.run.loss_dtype = settings.loss_dtype.value_or(DType::kFloat32);
  if (!settings.loss_dtype) {
    notes.push_back("--loss-dtype float32: the loss is computed in it");
  }
  if (!settings.tied && !settings.untied) {
    notes.push_back("--tied: the embedding is the output layer too");
  }
  check(subject.shape);
  return subject;
}

ModelSubject checkpoint_of(
    const Settings& settings,
    std::vector<std::string>& notes) {
  if (settings.has_gpt_flags()) {
    throw PlanError(
        "the shape comes from the checkpoint; flags of a GPT (--layers, --batch, --recompute, ...) do not go with it.");
  }
  const auto source = checkpoint::Source::open(settings.checkpoint);
  auto found = model_of(*source, settings.grouping);
  ModelSubject subject{.model = std::move(found.model)};
  if (settings.activations.empty()) {
    notes.emplace_back(
        "activations: not known from a checkpoint; give --activations BYTES");
  } else {
    subject.activation_bytes =
        parse_size("--activations", settings.activations);
  }
  if (found.num_left_out > 0) {
    notes.push_back(
        count_text(found.num_left_out, "tensor") +
        " of the checkpoint left out: not below " +
        format::in_quotes(
            settings.grouping.select.empty() ? "model"
                                             : settings.grouping.select));
  }
  if (found.num_buffers > 0) {
    notes.push_back(
        count_text(found.num_buffers, "tensor") +
        " without gradient: whole on every rank, as buffers");
  }
  notes.emplace_back(
      settings.grouping.unit.empty()
          ? "units: each module of a numbered list (blocks.7); the rest is the root"
          : "units: what --unit finds; the rest is the root");
  return subject;
}

void note_setup(const TrainingSetup& setup, std::vector<std::string>& notes) {
  if (setup.engine == Engine::Sharded) {
    notes.emplace_back(
        "the third step or later: gathers are ahead, the optimizer has state; fully_shard's padding");
  } else {
    notes.emplace_back("buckets of 1 MB, then 25 MB, as DDPOptions has them");
  }
  notes.emplace_back(
      "the loop is forward, backward, step, zero_grad: no gradients in forward");
  notes.emplace_back(
      "not counted: the model before it is sharded, buffers of NCCL, Gloo and shared memory, and what the allocator keeps or loses");
}

// ---- what fits -------------------------------------------------------------

FitReport fit_of(
    const Settings& settings,
    const plan::Subject& subject,
    const TrainingSetup& setup,
    const plan::Plan& plan) {
  const plan::Limit limit{parse_size("--memory", settings.memory)};
  FitReport fit{
      .limit_bytes = limit.bytes,
      .fits = plan.device.at_peak.total() <= limit.bytes,
      .smallest_world = smallest_world(subject, setup, limit)};
  const auto* gpt = std::get_if<GptSubject>(&subject);
  if (gpt == nullptr) {
    if (settings.largest) {
      throw PlanError(
          "--largest makes a GPT by flags larger; a checkpoint is as large as it is.");
    }
    return fit;
  }
  fit.grows = settings.largest.value_or("batch");
  if (fit.grows == "batch") {
    fit.largest = largest_batch(*gpt, setup, limit);
    return fit;
  }
  const bool by_layers = fit.grows == "layers";
  const auto shape = largest_gpt(
      *gpt, setup, limit, by_layers ? plan::Grows::Layers : plan::Grows::Width);
  if (shape) {
    fit.largest = by_layers ? shape->layers : shape->width;
    fit.largest_numel = model_of(*shape).numel();
  }
  return fit;
}

int print_plan(const Settings& settings) {
  PlanReport report;
  report.strategy = strategy_of(settings);
  report.setup = setup_of(settings, report.strategy);
  plan::Subject subject;
  if (settings.checkpoint.empty()) {
    subject = gpt_of(settings, report.notes);
  } else {
    subject = checkpoint_of(settings, report.notes);
  }
  note_setup(report.setup, report.notes);
  report.plan = make_plan(subject, report.setup);
  if (!settings.memory.empty()) {
    report.fit = fit_of(settings, subject, report.setup, report.plan);
  }
  std::cout << (settings.json ? plan_json(report) : plan_text(report));
  return report.fit && !report.fit->fits ? 1 : 0;
}

// ---- flags -----------------------------------------------------------------

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
  command.add_option(
      "CHECKPOINT", settings.checkpoint, "Of any format; or a GPT by flags");
  const std::string of_checkpoint = "Checkpoint";
  command
      .add_option(
          "--select",
          settings.grouping.select,
          "Names that begin with this, at a dot (default: model, where\nthere is optimizer state beside it)")
      ->group(of_checkpoint);
  command
      .add_option(
          "--unit",
          settings.grouping.unit,
          "Regular expression: names with the same match are a unit")
      ->type_name("REGEX")
      ->group(of_checkpoint);
  command
      .add_option(
          "--activations", settings.activations, "What backward needs, a rank")
      ->type_name("BYTES")
      ->group(of_checkpoint);
  const std::string of_gpt = "GPT";
  const auto add = [&](const char* name, auto& target, const char* help) {
    command.add_option(name, target, help)->group(of_gpt);
  };
  add("--layers", settings.layers, "Blocks");
  add("--width", settings.width, "Of the hidden states");
  add("--heads", settings.heads, "Default: of 64 elements each");
  add("--vocabulary", settings.vocabulary, "Default: 50257");
  add("--length", settings.length, "Of a sequence; default: 1024");
  add("--batch", settings.batch, "Sequences a rank and backward; default: 1");
  command
      .add_flag("--tied", settings.tied, "The embedding is the head (default)")
      ->group(of_gpt);
  command.add_flag("--untied", settings.untied, "The head has its own weight")
      ->group(of_gpt);
  command
      .add_flag(
          "--recompute", settings.recompute, "Each block under recompute()")
      ->group(of_gpt);
  add_dtype(
      command,
      "--loss-dtype",
      settings.loss_dtype,
      "Logits are cast to it (default: float32)");
  command.get_option("--loss-dtype")->group(of_gpt);
}

void add_setup_flags(CLI::App& command, Settings& settings) {
  command.add_option("--world", settings.world, "Ranks (default 1)");
  command.add_option(
      "--mesh", settings.mesh, "Hybrid: copies x shards, 8x2048");
  command
      .add_option(
          "--strategy",
          settings.strategy,
          "full_shard or fsdp (default), shard_grad_op, no_shard, hybrid, ddp, zero")
      ->check(CLI::IsMember(
          {"full_shard",
           "fsdp",
           "shard_grad_op",
           "no_shard",
           "hybrid",
           "ddp",
           "zero"}));
  command.add_option("--layout", settings.layout, "flat (default) or dim0")
      ->check(CLI::IsMember({"flat", "dim0"}));
  command.add_option(
      "--reshard-after-forward",
      settings.reshard_after_forward,
      "true or false; default: as the strategy has it");
  add_dtype(
      command,
      "--dtype",
      settings.dtype,
      "Of the shards; default: float32, or the checkpoint's");
  add_dtype(
      command,
      "--param-dtype",
      settings.param_dtype,
      "Of full parameters and activations; default: the shards'");
  add_dtype(
      command,
      "--reduce-dtype",
      settings.reduce_dtype,
      "Of gradients on the wire; default: the shards'");
  command
      .add_option_function<std::string>(
          "--optimizer",
          [&settings](const std::string& name) {
            settings.optimizer = kOptimizers.at(name);
          },
          "adamw (default), sgd, sgd-momentum, adagrad, rmsprop, none")
      ->check(CLI::IsMember(kOptimizers));
  command.add_option(
      "--accumulate", settings.accumulate, "Backwards a step (default 1)");
  command.add_flag(
      "--no-sync", settings.no_sync, "Only the last of these reduces");
  command.add_flag(
      "--offload",
      settings.offload,
      "Shards, their gradients and state in host memory");
  command.add_option("--device", settings.device, "cpu (default) or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

} // namespace

Action add_plan(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "plan", "Memory, traffic and what fits, before a run is started");
  add_model_flags(*command, *settings);
  add_setup_flags(*command, *settings);
  command
      ->add_option(
          "--memory", settings->memory, "Of a rank's device: 80GB, ...")
      ->type_name("BYTES");
  command
      ->add_option(
          "--largest",
          settings->largest,
          "GPT, with --memory: batch (default), layers or width")
      ->check(CLI::IsMember({"batch", "layers", "width"}));
  command->add_flag("--json", settings->json, "As JSON");
  command->footer(
      "Exit code: 0 planned, 1 it does not fit --memory, 2 it cannot be planned.\n"
      "Example: tessera plan --layers 48 --width 6144 --world 64 --memory 80GB\n"
      "           --param-dtype bf16 --recompute --device cuda");
  return [settings] {
    try {
      if (settings->memory.empty() && settings->largest) {
        throw PlanError("--largest needs --memory BYTES to fit into.");
      }
      return print_plan(*settings);
    } catch (const std::exception& error) {
      std::cerr << "tessera plan: " << error.what() << "\n";
      return kError;
    }
  };
}

} // namespace tessera::cli
