// ZeRO over LibTorch's own SGD: momentum that is divided over the ranks.
//
//   tessera run -n 2 zero_sgd [FOLDER]
//   zero_sgd                         # alone: one rank keeps all of it
//
// A network learns a function with data-parallel training. Each rank keeps the
// momentum of the parameters it owns. At the end rank 0 collects all of it,
// saves it to FOLDER, if one is named, and continues with a plain
// torch::optim::SGD, as a program on one machine would.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace {

using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;
namespace nn = torch::nn;

constexpr int kSteps = 300;
constexpr int64_t kBatch = 128; // over all ranks
constexpr int64_t kInputs = 16;
constexpr int64_t kWidth = 256;

SGDOptions sgd_options() {
  return SGDOptions(0.02).momentum(0.9).nesterov(true);
}

nn::Sequential make_model() {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(kInputs, kWidth), nn::Tanh());
  for (int i = 0; i < 4; ++i) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::Tanh());
  }
  model->push_back(nn::Linear(kWidth, 1));
  return model;
}

/// The mean squared error on fresh points of the function to learn.
Tensor loss_of(nn::Sequential& model, int64_t count, torch::Device device) {
  const auto x = torch::randn({count, kInputs}, device);
  const auto y = torch::sin(x.narrow(1, 0, 4).sum(1, /*keepdim=*/true));
  return torch::mse_loss(model->forward(x), y);
}

/// Bytes of momentum in an optimizer.
int64_t momentum_bytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [param, state] : optimizer.state()) {
    const auto& sgd = static_cast<const torch::optim::SGDParamState&>(*state);
    bytes += static_cast<int64_t>(sgd.momentum_buffer().nbytes());
  }
  return bytes;
}

/// Prints one line per rank, in the order of ranks.
void print_by_rank(const tessera::Group& world, const std::string& line) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(line.data());
  for (const auto& one : world.gather_bytes({bytes, line.size()}, 0)) {
    std::printf("%s\n", std::string(one.begin(), one.end()).c_str());
  }
}

/// Saves the collected state, and loads it into an optimizer that knows nothing
/// about ranks. Called on this rank alone.
void save_and_load(
    const tessera::Group& self,
    const tessera::StateDict& collected,
    const std::filesystem::path& folder,
    SGD& plain) {
  namespace checkpoint = tessera::checkpoint;
  std::filesystem::create_directories(folder);
  const auto path = folder / "optimizer";
  checkpoint::save(
      collected, path, checkpoint::SaveOptions().group(self).overwrite(true));

  tessera::optim::initialize_state(plain); // something to load into
  auto state = tessera::optim::state_dict(plain);
  checkpoint::load(state, path, checkpoint::LoadOptions().group(self));
  tessera::optim::load_state_dict(plain, state);
  std::printf("saved to %s, and loaded from there\n", path.c_str());
}

} // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  const auto world = tessera::init();
  torch::Device device = torch::kCPU;
  if (torch::cuda::is_available()) {
    const auto index = tessera::local_rank() % torch::cuda::device_count();
    device = torch::Device(torch::kCUDA, static_cast<int8_t>(index));
  }

  auto model = make_model();
  model->to(device);
  double last = 0;
  double first = 0;
  tessera::StateDict collected;
  {
    tessera::DistributedDataParallel ddp(model);
    tessera::ZeroRedundancyOptimizer optimizer(
        model->parameters(), tessera::optimizer_class<SGD>(sgd_options()));

    torch::manual_seed(1 + world.rank()); // each rank its own data
    for (int step = 0; step < kSteps; ++step) {
      const auto loss = loss_of(model, kBatch / world.size(), device);
      loss.backward(); // averages gradients over the ranks
      optimizer.step(); // steps what this rank owns; then all ranks get the new
                        // values
      optimizer.zero_grad();
      last = loss.item<double>();
      first = step == 0 ? last : first;
    }
    char line[100];
    std::snprintf(
        line,
        sizeof(line),
        "rank %d of %d keeps %.2f MB of momentum; loss %.3f, at first %.3f",
        world.rank(),
        world.size(),
        static_cast<double>(momentum_bytes(optimizer.optim())) / 1e6,
        last,
        first);
    print_by_rank(world, line);

    optimizer.consolidate_state_dict(/*to=*/0);
    if (world.rank() == 0) {
      collected = optimizer.state_dict(); // as an unsharded SGD has it
    }
  } // gradients are no longer averaged: rank 0 may continue alone
  if (world.rank() != 0) {
    return 0;
  }

  SGD plain(model->parameters(), sgd_options());
  if (folder.empty()) {
    tessera::optim::load_state_dict(plain, collected);
  } else {
    save_and_load(world.alone(), collected, folder, plain);
  }
  std::printf(
      "a plain SGD on rank 0 continues with %.2f MB of momentum\n",
      static_cast<double>(momentum_bytes(plain)) / 1e6);
  loss_of(model, kBatch, device).backward();
  plain.step();

  const double next = loss_of(model, kBatch, device).item<double>();
  const bool has_learned = next < first / 2;
  std::printf(
      "%s: loss %.3f\n",
      has_learned ? "ok" : "WRONG: it has not learned",
      next);
  return has_learned ? 0 : 1;
}
