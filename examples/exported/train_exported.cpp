// Trains a language model that was written in Python, with no Python in the
// process: it learns to count. Killed and started again, on any number of
// ranks, it goes on from its newest checkpoint.
//
//   tessera run -n 2 train_exported MODEL.pt2 FOLDER [STEPS [WEIGHTS]]
//
// WEIGHTS, a safetensors file or a folder of them, is for an archive that was
// exported without weights. No rank ever holds the whole model then.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int64_t kVocabulary = 256;

/// Rows of numbers that count up, each from its own start.
torch::Tensor batch(int64_t step, const tessera::Group& world) {
  const auto starts = torch::arange(8 * world.size()) * 31 + step * 7;
  const auto mine = starts.tensor_split(world.size())[world.rank()];
  return (mine.unsqueeze(1) + torch::arange(33)) % kVocabulary;
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(
        stderr, "usage: train_exported MODEL.pt2 FOLDER [STEPS [WEIGHTS]]\n");
    return 2;
  }
  const auto world = tessera::init();
  const bool has_weights = argc <= 4;
  auto model = tessera::load_exported(
      argv[1],
      tessera::ExportedOptions().deferred(true).allow_missing(!has_weights));
  tessera::fully_shard(
      model, tessera::FullyShardOptions().policy(tessera::block_policy(model)));
  if (!has_weights) {
    auto weights = tessera::get_model_state_dict(model);
    tessera::checkpoint::load(weights, argv[4]);
  }
  tessera::optim::AdamW optimizer(tessera::parameters(model), 3e-3);
  tessera::TrainingState training(model, {optimizer});
  tessera::checkpoint::Manager checkpoints(argv[2]);
  const int64_t steps = argc > 3 ? std::atoll(argv[3]) : 100;
  double loss_now = std::log(kVocabulary); // of a model that knows nothing

  const int64_t first = checkpoints.load_latest(training).value_or(0);
  for (int64_t step = first; step < steps; ++step) {
    const auto ids = batch(step, world);
    const auto logits = model->forward(ids.narrow(1, 0, 32));
    auto loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), ids.narrow(1, 1, 32).flatten());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step == first || (step + 1) % 20 == 0) {
      auto mean = loss.detach().clone();
      world.all_reduce(mean, tessera::ReduceOp::Avg);
      loss_now = mean.item<double>();
      if (world.rank() == 0) {
        std::printf(
            "step %3ld  loss %.4f\n", static_cast<long>(step + 1), loss_now);
      }
    }
    if ((step + 1) % 20 == 0) {
      checkpoints.save(step + 1, training);
    }
  }
  return loss_now < 0.5 * std::log(kVocabulary) ? 0 : 1;
}
