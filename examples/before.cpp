// A plain LibTorch training loop, on one device.
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
  torch::manual_seed(0);
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t step = 0; step < steps; ++step) {
    const auto [input, target] = batch(step);
    auto loss = torch::mse_loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    if ((step + 1) % 20 == 0) {
      std::printf("step %3ld  loss %.4f\n", step + 1, loss.item<double>());
    }
  }
}
