// A residual network learns to tell drawn shapes apart, with data-parallel
// training.
//
//   tessera run -n 2 resnet_ddp
//   resnet_ddp                       # alone, the same program
//
// Every rank has the whole model and draws its own images;
// DistributedDataParallel averages the gradients. The program draws its own
// images, so that nothing has to be downloaded, and fails if it has not
// learned.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cstdio>

namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr std::array kShapes{"disc", "ring", "square", "cross", "triangle"};
constexpr int64_t kClasses = kShapes.size();
constexpr int64_t kPixels = 24; // of a side
constexpr int64_t kBatch = 64; // over all ranks
constexpr int kSteps = 150;
constexpr int64_t kTestImages = 1000;
constexpr double kLearningRate = 3e-3;
constexpr double kMustReach = 0.85; // by guessing: 0.2

// ---- The images ------------------------------------------------------------

struct Images {
  Tensor pixels; // (count, 1, kPixels, kPixels)
  Tensor labels; // (count), which of kShapes
};

/// Shapes of any size, turned and placed at random, under noise.
Images draw(int64_t count, const torch::Device& device) {
  const auto options = torch::device(device);
  const auto uniform = [&](double low, double high) {
    return torch::rand({count, 1, 1}, options) * (high - low) + low;
  };
  const auto axis = torch::linspace(-1, 1, kPixels, options);
  const auto x = axis.view({1, 1, kPixels}) - uniform(-0.3, 0.3);
  const auto y = axis.view({1, kPixels, 1}) - uniform(-0.3, 0.3);
  const auto angle = uniform(0, 6.28);
  const auto size = uniform(0.45, 0.65);

  // From here on coordinates are in units of the shape: u and v along its
  // sides.
  const auto u = (x * angle.cos() + y * angle.sin()) / size;
  const auto v = (y * angle.cos() - x * angle.sin()) / size;
  const auto radius = (u.square() + v.square()).sqrt();
  const auto near = torch::minimum(u.abs(), v.abs());
  const auto far = torch::maximum(u.abs(), v.abs());
  const auto all = torch::stack(
      {radius < 1.0, // disc
       (radius < 1.0) & (radius > 0.6), // ring
       far < 0.85, // square
       (near < 0.25) & (far < 1.0), // cross
       (v > -0.5) & (v + 1.8 * u.abs() < 1.0)}, // triangle
      1); // (count, kClasses, kPixels, kPixels)

  const auto labels =
      torch::randint(kClasses, {count}, options.dtype(torch::kLong));
  const auto chosen = all.gather(
      1, labels.view({count, 1, 1, 1}).expand({count, 1, kPixels, kPixels}));
  const auto noise = torch::randn({count, 1, kPixels, kPixels}, options);
  return {chosen.to(torch::kFloat) + 0.3 * noise, labels};
}

// ---- The model: plain LibTorch ---------------------------------------------

nn::Conv2d convolution(int64_t in, int64_t out, int64_t stride) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

/// Two convolutions, added to what comes in.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride) {
    conv1 = register_module("conv1", convolution(in, out, stride));
    norm1 = register_module("norm1", nn::BatchNorm2d(out));
    conv2 = register_module("conv2", convolution(out, out, 1));
    norm2 = register_module("norm2", nn::BatchNorm2d(out));
    if (stride != 1 || in != out) {
      shortcut = register_module(
          "shortcut", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride)));
    }
  }

  Tensor forward(const Tensor& x) {
    const auto y = norm2(conv2(torch::relu(norm1(conv1(x)))));
    return torch::relu(y + (shortcut ? shortcut(x) : x));
  }

  nn::Conv2d conv1{nullptr};
  nn::Conv2d conv2{nullptr};
  nn::Conv2d shortcut{nullptr};
  nn::BatchNorm2d norm1{nullptr};
  nn::BatchNorm2d norm2{nullptr};
};
TORCH_MODULE(Block);

struct ResNetImpl : nn::Module {
  ResNetImpl() {
    stem = register_module("stem", convolution(1, 16, 1));
    norm = register_module("norm", nn::BatchNorm2d(16));
    blocks = register_module(
        "blocks",
        nn::Sequential(
            Block(16, 16, 1),
            Block(16, 32, 2),
            Block(32, 32, 1),
            Block(32, 64, 2)));
    head = register_module("head", nn::Linear(64, kClasses));
  }

  /// Logits, (count, kClasses).
  Tensor forward(const Tensor& pixels) {
    const auto features = blocks->forward(torch::relu(norm(stem(pixels))));
    return head(features.mean({2, 3}));
  }

  nn::Conv2d stem{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Sequential blocks{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(ResNet);

// ---- Training --------------------------------------------------------------

using Ddp = tessera::DistributedDataParallel<ResNetImpl>;

/// The share of images that are classified correctly. Each rank looks at a part
/// of them.
double accuracy(Ddp& ddp, const tessera::Group& world, torch::Device device) {
  const torch::NoGradGuard no_grad;
  ddp->eval();
  // The handle begins with rank 0's running means, so that all ranks evaluate
  // with the same ones.
  const auto images = draw(kTestImages / world.size(), device);
  const auto right = ddp(images.pixels).argmax(1).eq(images.labels);
  auto share = right.to(torch::kDouble).mean().cpu();
  world.all_reduce(share, tessera::ReduceOp::Avg);
  ddp->train();
  return share.item<double>();
}

} // namespace

int main() {
  const auto world = tessera::init();
  torch::Device device = torch::kCPU;
  if (torch::cuda::is_available()) {
    const auto index = tessera::local_rank() % torch::cuda::device_count();
    device = torch::Device(torch::kCUDA, static_cast<int8_t>(index));
  }

  torch::manual_seed(0); // the same start whenever it runs
  ResNet model;
  model->to(device);
  Ddp ddp(model); // all ranks take rank 0's model
  tessera::optim::AdamW optimizer(model->parameters(), kLearningRate);
  torch::manual_seed(1 + world.rank()); // each rank draws its own images

  const double before = accuracy(ddp, world, device);
  const auto start = std::chrono::steady_clock::now();
  for (int step = 1; step <= kSteps; ++step) {
    // The learning rate falls to zero, so that the running means of the norms
    // catch up.
    optimizer.param_groups()[0].options().set_lr(
        kLearningRate * (kSteps - step) / kSteps);
    const auto batch = draw(kBatch / world.size(), device);
    const auto loss =
        torch::cross_entropy_loss(ddp(batch.pixels), batch.labels);
    loss.backward(); // averages gradients over the ranks as they arrive
    optimizer.step();
    optimizer.zero_grad();
    if (step % 20 == 0 && world.rank() == 0) {
      std::printf("step %3d  loss %.3f\n", step, loss.item<double>());
      std::fflush(stdout);
    }
  }
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;

  const double after = accuracy(ddp, world, device);
  const bool has_learned = after >= kMustReach;
  if (world.rank() == 0) {
    std::printf(
        "%d rank(s), %.1f s: %.1f%% of new images right, %.1f%% before training\n%s\n",
        world.size(),
        seconds.count(),
        100 * after,
        100 * before,
        has_learned ? "ok: it tells the shapes apart"
                    : "WRONG: it has not learned");
  }
  return has_learned ? 0 : 1;
}
