// Trains what export_zoo.py wrote and compares memory with what is planned.
//
//   exported_memory FOLDER RESULTS.txt
//
// For each model of FOLDER/models.txt, without and with its repeated blocks
// recomputed, RESULTS.txt gets a line: model, "plain" or "recomputed", bytes
// that a forward leaves as planned and as measured, the largest activations and
// gradients of a step as planned and as measured, and the operators without a
// rule. Programs that were exported for any batch take four times the sample.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/source.h"
#include "exported/zoo/reference.h"
#include "plan/checkpoint_model.h"
#include "plan/plan.h"
#include "support/memory_meter.h"

namespace {

using tessera::ExportedArgs;
using tessera::testing::MemoryMeter;
using tessera::zoo::Reference;
using torch::Tensor;
namespace fs = std::filesystem;
namespace plan = tessera::plan;

constexpr int64_t kTimesTheSample = 4;
constexpr int kSteps = 3; // by then the optimizer has its state

struct Memory {
  int64_t saved = 0; // by a forward
  int64_t peak = 0; // above what there is between steps
};

plan::ProgramSubject subject_of(const fs::path& file) {
  const auto found = plan::model_of(
      *tessera::checkpoint::Source::open(file), plan::CheckpointOptions());
  return {
      .model = found.model,
      .run = {
          .program = plan::read_training_program(file),
          .params = found.places}};
}

Memory planned(const plan::Plan& made) {
  return {
      .saved = made.after_forward.total() - made.before_forward.total(),
      .peak = made.device.at_peak.total() - made.at_rest.total()};
}

/// The result that is a loss, or the cross-entropy of the first one that has a
/// gradient; what is planned.
Tensor loss_of(const std::vector<Tensor>& results) {
  std::optional<Tensor> logits;
  for (const Tensor& result : results) {
    if (result.requires_grad() && result.numel() == 1) {
      return result;
    }
    if (result.requires_grad() && !logits) {
      logits = result;
    }
  }
  TORCH_CHECK(logits, "no result has a gradient");
  const int64_t classes = logits->size(-1);
  const auto targets =
      torch::randint(classes, {logits->numel() / classes}, torch::kLong);
  return torch::cross_entropy_loss(
      logits->to(torch::kFloat).reshape({-1, classes}), targets);
}

/// Inputs of a step, new ones, `times` the sample along the batch.
ExportedArgs inputs_of(const Reference& reference, int64_t times) {
  ExportedArgs args;
  for (size_t i = 0; reference.contains("input." + std::to_string(i)); ++i) {
    const Tensor input = reference.at("input." + std::to_string(i));
    std::vector<int64_t> repeats(static_cast<size_t>(input.dim()), 1);
    if (!repeats.empty()) {
      repeats[0] = times;
    }
    args.add(input.repeat(repeats));
  }
  for (const auto& [name, input] : reference.named_inputs()) {
    args.set(name, input.clone());
  }
  return args;
}

Memory measured(
    const fs::path& folder,
    const std::vector<std::string>& recomputed,
    int64_t times) {
  const Reference reference(folder / "float32.safetensors");
  auto model = tessera::load_exported(folder / "float32.pt2");
  if (!recomputed.empty()) {
    tessera::apply_activation_checkpointing(
        model, [&](const torch::nn::Module& module) {
          const auto* part =
              dynamic_cast<const tessera::ExportedModule*>(&module);
          return part != nullptr &&
              std::find(recomputed.begin(), recomputed.end(), part->path()) !=
              recomputed.end();
        });
  }
  tessera::optim::AdamW optimizer(tessera::parameters(model), 1e-3);
  Memory memory;
  MemoryMeter meter;
  for (int step = 0; step < kSteps; ++step) {
    const auto rest = static_cast<int64_t>(meter.live_bytes());
    meter.reset_peak();
    {
      const ExportedArgs args = inputs_of(reference, times);
      const Tensor loss = loss_of(model->forward(args).tensors());
      memory.saved = static_cast<int64_t>(meter.live_bytes()) - rest;
      loss.backward();
    }
    memory.peak = static_cast<int64_t>(meter.peak_bytes()) - rest;
    optimizer.step();
    optimizer.zero_grad();
  }
  return memory;
}

void compare(const fs::path& folder, bool recomputes, std::ostream& results) {
  plan::ProgramSubject subject = subject_of(folder / "float32.pt2");
  const auto sample = plan::GraphSizes(*subject.run.program, {}).chosen().batch;
  const int64_t times = sample ? kTimesTheSample : 1;
  if (sample) {
    subject.run.sizes.batch = times * *sample;
  }
  std::vector<std::string> blocks;
  if (recomputes) {
    blocks = tessera::repeated_blocks(
        tessera::load_exported(folder / "float32.pt2"));
    if (blocks.empty()) {
      return;
    }
    subject.run.recomputes = true;
  }
  const plan::Plan made = plan::make_plan(
      subject,
      {.engine = plan::Engine::Ddp, .copies = 1, .device = plan::Device::Cpu});
  const Memory expected = planned(made);
  const Memory found = measured(folder, blocks, times);
  results << folder.filename().string() << '\t'
          << (recomputes ? "recomputed" : "plain") << '\t' << expected.saved
          << '\t' << found.saved << '\t' << expected.peak << '\t' << found.peak
          << '\t';
  for (const std::string& name : made.unknown_operators) {
    results << name << ' ';
  }
  results << std::endl;
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: exported_memory FOLDER RESULTS.txt\n");
    return 2;
  }
  const auto world = tessera::init();
  at::set_num_threads(1);
  const fs::path folder = argv[1];
  std::ofstream results(argv[2]);
  std::ifstream models(folder / "models.txt");
  int failures = 0;
  for (std::string name; std::getline(models, name);) {
    for (const bool recomputes : {false, true}) {
      try {
        compare(folder / name, recomputes, results);
      } catch (const std::exception& error) {
        ++failures;
        std::printf("%s: %s\n", name.c_str(), error.what());
      }
    }
  }
  return failures == 0 ? 0 : 1;
}
