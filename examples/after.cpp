// The same loop on any number of ranks, with checkpoints.
#include <tessera/tessera.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return x + down->forward(torch::gelu(up->forward(norm->forward(x))));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 6; ++i) {
      blocks->push_back(Block(64));
    }
    register_module("blocks", blocks);
    register_module("head", head);
  }

  torch::Tensor forward(torch::Tensor x) {
    return head->forward(blocks->forward(x));
  }

  torch::nn::Sequential blocks;
  torch::nn::Linear head{64, 1};
};
TORCH_MODULE(Net);

// Batch number `step`, the same whenever it is asked for: how far a point is
// from the origin.
std::pair<torch::Tensor, torch::Tensor> batch(int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
  auto points = torch::randn({64, 64}, generator);
  return {points, points.norm(2, 1, /*keepdim=*/true) - 8};
}

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100;
  const tessera::Group world = tessera::init();
  tessera::seed(0);
  Net model;
  for (auto& block : *model->blocks) {
    tessera::fully_shard(block);
  }
  tessera::fully_shard(model);
  tessera::optim::AdamW optimizer(tessera::parameters(model), 1e-3);

  tessera::GradientAccumulation accumulation(
      model, {optimizer}, tessera::GradientAccumulationOptions().max_norm(1.0));
  tessera::TrainingState training(model, {optimizer});
  tessera::checkpoint::Manager checkpoints("checkpoints");
  const int64_t first = checkpoints.load_latest(training).value_or(0);

  for (int64_t step = first; step < steps; ++step) {
    const auto [inputs, targets] = batch(step);
    const auto input = inputs.tensor_split(world.size())[world.rank()];
    const auto target = targets.tensor_split(world.size())[world.rank()];
    auto loss = torch::mse_loss(model->forward(input), target);
    accumulation.backward(loss, input.size(0));
    if ((step + 1) % 20 == 0) {
      tessera::Metrics metrics;
      metrics.mean("loss", loss, input.size(0));
      const double mean = metrics.reduce().at("loss");
      if (world.rank() == 0) {
        std::printf("step %3ld  loss %.4f\n", step + 1, mean);
      }
    }
    if ((step + 1) % 50 == 0) {
      checkpoints.async_save(step + 1, training);
    }
  }
  checkpoints.wait();
}
