// Runs what export_zoo.py wrote and compares with what Python got.
//
//   tessera run -n 2 exported_zoo FOLDER RESULTS.txt
//
// For each model of FOLDER/models.txt, on any number of ranks: 5 steps of AdamW
// in double, sharded in both layouts, and with repeated blocks recomputed: each
// loss within 1e-9 of Python's. Alone, before that: outputs, loss,
// every gradient and the buffers in float32, bit for bit. RESULTS.txt gets a
// line for each check: model, check, "ok", "no blocks" to recompute, or what is
// wrong. The program fails if something is.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "exported/zoo/reference.h"

namespace {

using tessera::zoo::Reference;
using torch::Tensor;
namespace fs = std::filesystem;

constexpr uint64_t kSeed = 1000; // of export_zoo.py
constexpr double kTolerance = 1e-9;
constexpr auto kOk = "ok";
constexpr auto kNoBlocks = "no blocks";

struct Check {
  std::string name;
  std::function<void()> run;
};

/// Thrown by a check that does not apply.
struct NoBlocks : std::exception {
  const char* what() const noexcept override {
    return kNoBlocks;
  }
};

/// Throws unless the tensors are equal bit for bit.
void require_same(
    const std::string& what,
    const Tensor& actual,
    const Tensor& expected) {
  if (actual.defined() && actual.sizes() == expected.sizes() &&
      actual.scalar_type() == expected.scalar_type() &&
      torch::equal(
          actual.contiguous().view(-1).view(torch::kByte),
          expected.contiguous().view(-1).view(torch::kByte))) {
    return;
  }
  std::string text = what + " is not Python's";
  if (!actual.defined()) {
    text += ": there is none";
  } else if (actual.sizes() != expected.sizes()) {
    text += c10::str(": ", actual.sizes(), " instead of ", expected.sizes());
  } else {
    const auto difference =
        (actual.to(torch::kDouble) - expected.to(torch::kDouble)).abs();
    text += c10::str(": differs by up to ", difference.max().item<double>());
  }
  throw std::runtime_error(text);
}

/// In float32, alone: all that Python has, bit for bit.
void compare_bits(const fs::path& folder) {
  const Reference reference(folder / "float32.safetensors");
  auto model = tessera::load_exported(folder / "float32.pt2");

  model->eval();
  {
    torch::NoGradGuard no_grad;
    torch::manual_seed(kSeed);
    const auto outputs = model->forward(reference.inputs()).tensors();
    for (size_t i = 0; i < reference.count("eval_output."); ++i) {
      const auto name = "eval_output." + std::to_string(i);
      require_same(name, outputs.at(i), reference.at(name));
    }
  }

  model->train();
  torch::manual_seed(kSeed);
  const auto outputs = model->forward(reference.inputs()).tensors();
  for (size_t i = 0; i < reference.count("output."); ++i) {
    const auto name = "output." + std::to_string(i);
    require_same(name, outputs.at(i).detach(), reference.at(name));
  }
  const auto loss = reference.loss_of(outputs);
  require_same("the loss", loss.detach(), reference.at("loss"));
  loss.backward();
  size_t with_gradient = 0;
  for (const auto& item : model->named_parameters()) {
    const auto name = "gradient." + item.key();
    if (reference.contains(name)) {
      require_same(name, item.value().grad(), reference.at(name));
      ++with_gradient;
    }
  }
  if (with_gradient != reference.count("gradient.")) {
    throw std::runtime_error(c10::str(
        "Python has ",
        reference.count("gradient."),
        " gradients, ",
        with_gradient,
        " of them belong to parameters here"));
  }
  for (const auto& item : model->named_buffers()) {
    const auto name = "buffer." + item.key();
    if (reference.contains(name)) {
      require_same(name, item.value(), reference.at(name));
    }
  }
}

/// In double: the losses of some steps.
void compare_losses(
    const fs::path& folder,
    std::optional<tessera::ShardLayout> layout,
    bool recomputes = false) {
  const Reference reference(folder / "float64.safetensors");
  auto model = tessera::load_exported(folder / "float64.pt2");
  if (recomputes) {
    const auto blocks = tessera::repeated_blocks(model);
    if (blocks.empty()) {
      throw NoBlocks();
    }
    const std::set<std::string> chosen(blocks.begin(), blocks.end());
    tessera::apply_activation_checkpointing(
        model, [&](const torch::nn::Module& module) {
          const auto* part =
              dynamic_cast<const tessera::ExportedModule*>(&module);
          return part != nullptr && chosen.contains(part->path());
        });
  }
  if (layout) {
    tessera::fully_shard(
        model,
        tessera::FullyShardOptions().layout(*layout).policy(
            tessera::block_policy(model)));
  }
  tessera::optim::AdamW optimizer(tessera::parameters(model), 1e-3);
  const auto expected = reference.at("losses");
  for (int64_t step = 0; step < expected.size(0); ++step) {
    torch::manual_seed(kSeed + static_cast<uint64_t>(step));
    const auto loss =
        reference.loss_of(model->forward(reference.inputs()).tensors());
    const auto actual = loss.item<double>();
    const auto wanted = expected[step].item<double>();
    if (!(std::abs(actual - wanted) <= kTolerance * std::abs(wanted))) {
      throw std::runtime_error(c10::str(
          "loss ",
          step,
          " is ",
          actual,
          ", Python's ",
          wanted,
          ", off by ",
          std::abs(actual - wanted) / std::abs(wanted),
          " of its size"));
    }
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}

std::vector<Check> checks_of(const fs::path& folder, int64_t world_size) {
  std::vector<Check> checks;
  if (world_size == 1) {
    checks.push_back({"bits", [=] { compare_bits(folder); }});
  }
  if (!fs::exists(folder / "float64.pt2")) {
    return checks; // the model cannot run in double; run_zoo.py knows which
  }
  if (world_size == 1) {
    checks.push_back({"plain", [=] { compare_losses(folder, std::nullopt); }});
    checks.push_back({"recompute_plain", [=] {
                        compare_losses(folder, std::nullopt, true);
                      }});
  }
  checks.push_back(
      {"flat", [=] { compare_losses(folder, tessera::ShardLayout::Flat); }});
  checks.push_back(
      {"dim0", [=] { compare_losses(folder, tessera::ShardLayout::Dim0); }});
  checks.push_back({"recompute", [=] {
                      compare_losses(folder, tessera::ShardLayout::Flat, true);
                    }});
  checks.push_back({"recompute_dim0", [=] {
                      compare_losses(folder, tessera::ShardLayout::Dim0, true);
                    }});
  return checks;
}

/// Runs a check; ranks agree on what went wrong, so that none waits for
/// another.
std::string outcome_of(const tessera::Group& world, const Check& check) {
  std::string text = kOk;
  try {
    check.run();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  const auto all = world.all_gather_bytes(
      {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, "outcome");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string one(all[rank].begin(), all[rank].end());
    if (one != kOk) {
      return one == kNoBlocks ? one
                              : "rank " + std::to_string(rank) + ": " + one;
    }
  }
  return kOk;
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: exported_zoo FOLDER RESULTS.txt\n");
    return 2;
  }
  const auto world = tessera::init();
  at::set_num_threads(1); // as export_zoo.py: sums are then in the same order
  const fs::path folder = argv[1];
  std::ofstream results;
  if (world.rank() == 0) {
    results.open(argv[2]);
  }
  std::ifstream models(folder / "models.txt");
  int failures = 0;
  int passes = 0;
  const auto began = std::chrono::steady_clock::now();
  for (std::string name; std::getline(models, name);) {
    for (const auto& check : checks_of(folder / name, world.size())) {
      const auto outcome = outcome_of(world, check);
      const bool is_good = outcome == kOk || outcome == kNoBlocks;
      (is_good ? passes : failures) += 1;
      if (world.rank() == 0) {
        results << name << '\t' << check.name << '\t' << outcome << std::endl;
        if (!is_good) {
          std::printf(
              "%s, %s: %s\n",
              name.c_str(),
              check.name.c_str(),
              outcome.c_str());
        }
      }
    }
  }
  if (world.rank() == 0) {
    const auto seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began)
            .count();
    std::printf(
        "%d ranks: %d checks passed, %d failed, %.0f s\n",
        static_cast<int>(world.size()),
        passes,
        failures,
        seconds);
    if (passes + failures == 0) {
      std::printf("%s lists no models\n", (folder / "models.txt").c_str());
    }
  }
  return failures == 0 && passes > 0 ? 0 : 1;
}
