// Trains a small GPT on LibTorch's own headers: first plainly in one process,
// then with fully_shard on all ranks. Both must learn the same.
//
//   tessera run -n 2 demo                  # what `make demo` does
//   tessera run -n 4 demo --steps 300
//   demo --help
//
// Read train_plain and train_sharded: their difference is what Tessera asks of
// a program. model.h is the model, text.h the data, report.h what is printed.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "model.h"
#include "report.h"
#include "settings.h"
#include "text.h"

namespace {

using gpt::Batch;
using gpt::Gpt;
using gpt::Report;
using gpt::Run;
using gpt::Settings;
using gpt::Text;

constexpr uint64_t kSeed = 0;
constexpr double kLearningRate = 1e-3;
constexpr int64_t kWarmUpSteps = 10;
constexpr double kMaxGradNorm = 1.0;
constexpr int64_t kTextBytes = 1 << 20;
constexpr int64_t kSampleBytes = 200;
constexpr const char* kPrompt = "#include <ATen/";

/// The same model on every rank, and the same for both runs.
Gpt make_model(const Settings& settings) {
  torch::manual_seed(kSeed);
  return Gpt(gpt::GptConfig{
      .length = settings.length,
      .layers = settings.layers,
      .heads = settings.heads,
      .width = settings.width});
}

/// Rises over the first steps. Gradients of a fresh model all point one way,
/// and full steps from the start would overshoot.
void set_learning_rate(tessera::optim::AdamW& optimizer, int64_t step) {
  const double share = static_cast<double>(step + 1) / kWarmUpSteps;
  optimizer.param_groups()[0].options().set_lr(
      kLearningRate * std::min(1.0, share));
}

/// Notes what this process holds between steps.
void measure_memory(
    Run& run,
    const std::vector<torch::Tensor>& parameters,
    const tessera::optim::AdamW& optimizer) {
  for (const auto& parameter : parameters) {
    run.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
    if (const auto* state = optimizer.find_state(parameter)) {
      run.optimizer_bytes += static_cast<int64_t>(
          state->at("exp_avg").tensor().nbytes() +
          state->at("exp_avg_sq").tensor().nbytes());
    }
  }
}

/// The whole batch in this process.
Run train_plain(
    const Settings& settings,
    const Text& text,
    const Report& report) {
  Gpt model = make_model(settings);
  tessera::optim::AdamW optimizer(model->parameters());

  Run run;
  for (int64_t step = 0; step < settings.steps; ++step) {
    const Batch batch =
        text.windows(step * settings.batch, settings.batch, settings.length);
    const auto loss = loss_of(model, batch.inputs, batch.targets);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), kMaxGradNorm);
    set_learning_rate(optimizer, step);
    optimizer.step();
    optimizer.zero_grad();

    run.record(loss.item<double>());
    report.show_plain(run);
  }
  measure_memory(run, model->parameters(), optimizer);
  return run;
}

/// The same steps by all ranks: each has a part of the model, which is sharded
/// here, and a part of every batch.
Run train_sharded(
    Gpt& model,
    const tessera::Group& world,
    const Settings& settings,
    const Text& text,
    const Report& report,
    const Run& plain) {
  // A unit for each block, gathered when it computes and freed after, and one
  // for the rest: the embeddings and the last norm.
  for (const auto& block : *model->blocks) {
    tessera::fully_shard(*block);
  }
  tessera::fully_shard(*model);
  tessera::optim::AdamW optimizer(tessera::parameters(*model));

  const int64_t rows = settings.batch / world.size();
  const int64_t first_row = world.rank() * rows;

  Run run;
  for (int64_t step = 0; step < settings.steps; ++step) {
    const Batch batch =
        text.windows(step * settings.batch + first_row, rows, settings.length);
    const auto loss = loss_of(model, batch.inputs, batch.targets);
    loss.backward(); // averages the gradients over the ranks as it goes
    tessera::clip_grad_norm_(*model, kMaxGradNorm); // the norm over all ranks
    set_learning_rate(optimizer, step);
    optimizer.step(); // of this rank's shards
    optimizer.zero_grad();

    const auto mean_loss = loss.detach();
    world.all_reduce(mean_loss, tessera::ReduceOp::Avg);
    run.record(mean_loss.item<double>());
    report.show_sharded(run, plain);
  }
  measure_memory(run, tessera::parameters(*model), optimizer);
  return run;
}

int demonstrate(
    const tessera::Group& world,
    const Settings& settings,
    const std::string& program) {
  const Report report(settings, world.rank(), world.size());
  const Text text = Text::read_headers(settings.text, kTextBytes);
  Gpt model = make_model(settings);
  int64_t num_parameters = 0;
  for (const auto& parameter : model->parameters()) {
    num_parameters += parameter.numel();
  }
  report.print(
      "A GPT of %.2f million parameters reads %ld of LibTorch's headers, byte by byte:",
      static_cast<double>(num_parameters) / 1e6,
      text.num_files());
  report.print(
      "%ld steps of %ld windows of %ld bytes.",
      settings.steps,
      settings.batch,
      settings.length);

  // Rank 0 alone; the others wait for it in their first collective.
  Run plain;
  if (world.rank() == 0) {
    report.print(
        "\n1. Plain LibTorch: 1 process with %d thread(s)",
        torch::get_num_threads());
    plain = train_plain(settings, text, report);
  }

  report.print(
      "\n2. fully_shard: %d rank(s) with %d thread(s) and %ld windows each",
      world.size(),
      torch::get_num_threads(),
      settings.batch / world.size());
  const Run sharded =
      train_sharded(model, world, settings, text, report, plain);

  // Every rank takes part, since every use of a parameter gathers it.
  const std::string sample = write_on(model, kPrompt, kSampleBytes, kSeed);
  if (world.rank() != 0) {
    return 0;
  }
  report.show_costs(sharded, plain);
  report.print("\n3. The sharded model goes on from \"%s\"", kPrompt);
  report.show_text(sample);
  if (!report.judge(sharded, plain)) {
    return 1;
  }
  const auto launcher =
      std::filesystem::path(program).parent_path() / "tessera";
  report.print("\nNext: read examples/gpt/train.cpp, which did this, or try");
  report.print("   %s run -n 4 %s", launcher.c_str(), program.c_str());
  report.print(
      "   %s run -n 2 %s --steps 500", launcher.c_str(), program.c_str());
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  const auto world = tessera::init();
  try {
    const Settings settings = gpt::parse_settings(argc, argv, world.size());
    if (!settings.help) {
      return demonstrate(world, settings, argv[0]);
    }
    if (world.rank() == 0) {
      std::printf("%s", gpt::usage().c_str());
    }
    return 0;
  } catch (const gpt::UsageError& error) {
    if (world.rank() == 0) {
      std::fprintf(stderr, "demo: %s\n%s", error.what(), gpt::usage().c_str());
    }
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "demo: %s\n", error.what());
    return 1;
  }
}
