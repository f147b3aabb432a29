// test/distributed/optim/test_zero_redundancy_optimizer.py, the end: steps of
// ZeRO inside the backward of a data parallel model.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/optim/sgd.h>
#include <tessera/zero/ddp_zero_hook.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <functional>
#include <string>
#include <vector>

#include "parity/support.h"
#include "parity/zero_support.h"
#include "support/device.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using parity::copy_values;
using parity::is_close;
using parity::kBooleans;
using parity::LeafRuns;
using parity::linears;
using tessera::testing::on_ranks;
using tessera::testing::test_device;

using Params = std::vector<at::Tensor>;

constexpr int kInputs = 5;

/// A model, and what it is called with.
struct Subject {
  std::function<torch::nn::Sequential()> make;
  std::vector<int64_t> input;
  DDPOptions options; // that give it two buckets or more
};

/// Model A: two layers, whose buckets PyTorch's sizes make of it.
Subject two_layers() {
  return {[] { return linears({{1000, 2000}, {2000, 500}}); }, {1, 1000}, {}};
}

/// Model B on the CPU, in place of a ResNet: 16 cases of one take too long.
Subject convolutions() {
  return {
      [] {
        torch::nn::Sequential model(
            torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).bias(false)),
            torch::nn::BatchNorm2d(8),
            torch::nn::ReLU(),
            torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).stride(2)),
            torch::nn::BatchNorm2d(16),
            torch::nn::ReLU(),
            torch::nn::Flatten(),
            torch::nn::Linear(16 * 6 * 6, 10));
        model->to(test_device());
        return model;
      },
      {2, 3, 15, 15},
      DDPOptions().first_bucket_mb(1e-3).bucket_cap_mb(2e-3)};
}

torch::nn::Conv2d convolution(
    int64_t in,
    int64_t out,
    int64_t size,
    int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size)
                               .stride(stride)
                               .padding(size / 2)
                               .bias(false));
}

/// A block of ResNet-50: 1x1, 3x3, 1x1, and a way past them.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride) {
    const int64_t out = 4 * width;
    main = register_module(
        "main",
        torch::nn::Sequential(
            convolution(in, width, 1),
            torch::nn::BatchNorm2d(width),
            torch::nn::ReLU(),
            convolution(width, width, 3, stride),
            torch::nn::BatchNorm2d(width),
            torch::nn::ReLU(),
            convolution(width, out, 1),
            torch::nn::BatchNorm2d(out)));
    if (in != out || stride != 1) {
      past = register_module(
          "past",
          torch::nn::Sequential(
              convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::relu(
        main->forward(x) + (past.is_empty() ? x : past->forward(x)));
  }

  torch::nn::Sequential main{nullptr};
  torch::nn::Sequential past{nullptr};
};
TORCH_MODULE(Bottleneck);

/// Model B: the layers of torchvision's resnet50, 25.6 million parameters.
torch::nn::Sequential make_resnet50() {
  torch::nn::Sequential model(
      convolution(3, 64, 7, 2),
      torch::nn::BatchNorm2d(64),
      torch::nn::ReLU(),
      torch::nn::MaxPool2d(
          torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  int64_t in = 64;
  const int64_t num_blocks[] = {3, 4, 6, 3};
  for (int64_t stage = 0; stage < 4; ++stage) {
    const int64_t width = 64 << stage;
    for (int64_t i = 0; i < num_blocks[stage]; ++i) {
      model->push_back(Bottleneck(in, width, i == 0 && stage > 0 ? 2 : 1));
      in = 4 * width;
    }
  }
  model->push_back(torch::nn::AdaptiveAvgPool2d(1));
  model->push_back(torch::nn::Flatten());
  model->push_back(torch::nn::Linear(in, 1000));
  model->to(test_device());
  return model;
}

Subject resnet50() {
  return {make_resnet50, {1, 3, 3, 1000}, {}};
}

/// The models of PyTorch's test, as far as this device is made for them.
std::vector<Subject> all_subjects() {
  return {two_layers(), test_device().is_cuda() ? resnet50() : convolutions()};
}

/// Sums in cuDNN in one order, as PyTorch's test has it.
class DeterministicCuDNN {
 public:
  DeterministicCuDNN() {
    at::globalContext().setDeterministicCuDNN(true);
  }
  ~DeterministicCuDNN() {
    at::globalContext().setDeterministicCuDNN(was_);
  }
  DeterministicCuDNN(const DeterministicCuDNN&) = delete;
  DeterministicCuDNN& operator=(const DeterministicCuDNN&) = delete;

 private:
  const bool was_ = at::globalContext().deterministicCuDNN();
};

struct Flags {
  bool is_interleaved;
  bool gradient_as_bucket_view;
  bool static_graph;
  bool shard_buckets;
};

Params values_of(const torch::nn::Sequential& model) {
  Params values;
  for (const at::Tensor& param : model->parameters()) {
    values.push_back(param.detach().clone());
  }
  return values;
}

bool are_equal(const Params& a, const Params& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), [](const auto& left, const auto& right) {
        return torch::equal(left, right);
      });
}

void check_overlap(
    const Group& world,
    const Subject& subject,
    const Flags& flags) {
  const DeterministicCuDNN deterministic;
  torch::manual_seed(0);
  auto model = subject.make();
  auto plain_model = subject.make();
  copy_values(*model, *plain_model);
  Params inputs;
  for (int i = 0; i < kInputs; ++i) {
    inputs.push_back(torch::randn(subject.input).to(test_device()));
  }
  const auto options =
      DDPOptions(subject.options)
          .gradient_as_bucket_view(flags.gradient_as_bucket_view)
          .static_graph(flags.static_graph);
  const auto sgd = optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.001);

  DistributedDataParallel ddp(model, options);
  ZeroRedundancyOptimizer zero(
      model->parameters(),
      optimizer_class<optim::SGD>(sgd),
      ZeroOptions().overlap_with_ddp(true));
  const auto make_hook = flags.is_interleaved ? hook_with_zero_step_interleaved
                                              : hook_with_zero_step;
  size_t num_buckets = 0;
  ddp.register_comm_hook(
      [&,
       hook = make_hook(allreduce_hook(world), ddp, zero, flags.shard_buckets)](
          GradBucket& bucket) {
        num_buckets = std::max(num_buckets, bucket.index() + 1);
        return hook(bucket);
      });
  DistributedDataParallel plain(plain_model, options);
  optim::SGD optimizer(plain_model->parameters(), sgd);

  const Params start = values_of(model);
  for (size_t i = 0; i < start.size(); ++i) {
    EXPECT_TRUE(is_close(start[i], plain_model->parameters()[i]));
  }
  // Gradients of the warm-up add up until the first zero_grad().
  for (int i = 0; i < (flags.static_graph ? 3 : 2); ++i) {
    ddp(inputs[i]).sum().backward();
    EXPECT_TRUE(are_equal(values_of(model), start)) << "warm-up " << i;
  }
  world.barrier();
  for (const at::Tensor& input : inputs) {
    zero.zero_grad();
    ddp(input).sum().backward();
  }
  world.barrier();
  for (const at::Tensor& input : inputs) {
    optimizer.zero_grad();
    plain(input).sum().backward();
    optimizer.step();
  }
  world.barrier();
  const Params trained = values_of(model);
  const Params expected = values_of(plain_model);
  for (size_t i = 0; i < trained.size(); ++i) {
    EXPECT_TRUE(is_close(trained[i], expected[i])) << "parameter " << i;
    EXPECT_FALSE(torch::equal(trained[i], start[i])) << "parameter " << i;
  }
  EXPECT_GE(num_buckets, 2u);
  // Stronger: the state is what the plain optimizer has.
  zero.consolidate_state_dict(0);
  if (world.rank() == 0) {
    EXPECT_TRUE(is_close(zero.state_dict(), optimizer.state_dict()));
  }
}

void check_all(
    const Group& world,
    LeafRuns& leaves,
    const std::vector<Subject>& subjects) {
  for (const bool is_interleaved : kBooleans) {
    for (const bool bucket_view : kBooleans) {
      for (const bool static_graph : kBooleans) {
        for (const bool shard_buckets : kBooleans) {
          const std::string name = parity::text("interleaved", is_interleaved) +
              parity::text("bucket view", bucket_view) +
              parity::text("static graph", static_graph) +
              parity::text("shard buckets", shard_buckets);
          leaves.run(name, [&] {
            for (const Subject& subject : subjects) {
              check_overlap(
                  world,
                  subject,
                  {is_interleaved, bucket_view, static_graph, shard_buckets});
            }
          });
        }
      }
    }
  }
}

TEST(TestZeroRedundancyOptimizerDistributed, test_ddp_zero_overlap) {
  const auto run_extra =
      [](const char* backend, int size, const std::vector<Subject>& subjects) {
        on_ranks(
            {.size = size,
             .backend = backend,
             .test_timeout = std::chrono::seconds(240)},
            [&](const Group& world) {
              const ::testing::ScopedTrace trace(
                  __FILE__,
                  __LINE__,
                  std::string(backend) + " on " + std::to_string(size));
              LeafRuns leaves(world, LeafRuns::Kind::Extra);
              check_all(world, leaves, subjects);
            });
      };
  // Four ranks first: nobody waits for the two that continue. PyTorch refuses
  // to run it on Gloo.
  run_extra("auto", 4, {convolutions()});
  run_extra("gloo", 4, {convolutions()});
  run_extra("gloo", 2, {two_layers(), convolutions()});
  on_ranks(
      {.size = 2, .test_timeout = std::chrono::seconds(240)},
      [](const Group& world) {
        LeafRuns leaves(world);
        check_all(world, leaves, all_subjects());
      });
}

} // namespace
} // namespace tessera
