// test/distributed/optim/test_zero_redundancy_optimizer.py, continued: together
// with data parallel models.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/byte_vector.h"
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
using parity::on_two_and_four_ranks;
using tessera::testing::test_device;

using Params = std::vector<at::Tensor>;

/// Three layers, and a buffer that is not the same everywhere.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(float value) {
    layers = register_module("layers", linears({{2, 3}, {3, 3}, {3, 3}}));
    buffer = register_buffer(
        "test_buffer", torch::full({1}, value).to(test_device()));
  }
  at::Tensor forward(const at::Tensor& x) {
    return layers->forward(x);
  }

  torch::nn::Sequential layers{nullptr};
  at::Tensor buffer;
};
TORCH_MODULE(Buffered);

/// A class of optimizers, whole and sharded.
struct Kind {
  const char* name;
  MakeOptimizer make;
};

std::vector<Kind> kinds(bool maximize) {
  return {
      {"Adam",
       optimizer_class<optim::Adam>(
           optim::AdamOptions(1e-3).maximize(maximize))},
      {"AdamW",
       optimizer_class<optim::AdamW>(
           optim::AdamWOptions(1e-3).maximize(maximize))},
      {"SGD",
       optimizer_class<optim::SGD>(
           optim::SGDOptions(1e-3).maximize(maximize))}};
}

void check_local_optimizer_parity(
    const Group& world,
    const MakeOptimizer& make) {
  torch::manual_seed(world.rank());
  Buffered model(world.rank());
  ZeroRedundancyOptimizer zero(model->parameters(), make);
  const auto options =
      DDPOptions().broadcast_buffers(true).find_unused_parameters(true);
  DistributedDataParallel ddp(model, options);
  Buffered local(0);
  copy_values(*model, *local);
  EXPECT_EQ(local->buffer.item<float>(), 0);
  const auto plain =
      make({torch::optim::OptimizerParamGroup(local->parameters())});
  DistributedDataParallel local_ddp(local, options);

  const auto expect_same = [&] {
    const auto params = model->parameters();
    const auto expected = local->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(torch::allclose(params[i], expected[i], 1e-5, 1e-3));
    }
    EXPECT_TRUE(is_close(model->buffer, local->buffer));
  };
  const auto loss_of = [](torch::optim::Optimizer& optimizer,
                          DistributedDataParallel<BufferedImpl>& replica,
                          const at::Tensor& input) {
    return optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = replica(input).abs().sum();
      loss.backward();
      return loss;
    });
  };
  torch::manual_seed(100 + world.rank()); // inputs differ
  const auto check_step = [&] {
    const at::Tensor input = torch::rand({64, 2}).to(test_device());
    const at::Tensor loss = loss_of(zero, ddp, input);
    EXPECT_TRUE(is_close(loss, loss_of(*plain, local_ddp, input)));
    expect_same();
  };

  expect_same();
  const Params before = {model->parameters()[1].detach().clone()};
  for (int i = 0; i < 20; ++i) {
    check_step();
    if (i > 10) {
      model->parameters()[0].requires_grad_(i % 2 == 1);
      local->parameters()[0].requires_grad_(i % 2 == 1);
    }
  }
  EXPECT_FALSE(torch::equal(before[0], model->parameters()[1]));

  zero.consolidate_state_dict(0);
  Bytes bytes;
  if (world.rank() == 0) {
    bytes = state_dict_to_bytes(zero.state_dict());
  }
  const StateDict sharded =
      state_dict_from_bytes(world.broadcast_bytes(bytes, 0));
  const StateDict whole = optim::state_dict(*plain).clone();
  optim::load_state_dict(*plain, sharded);
  zero.load_state_dict(whole);
  check_step();
  optim::load_state_dict(*plain, whole);
  zero.load_state_dict(sharded);
  check_step();
}

TEST(TestZeroRedundancyOptimizerDistributed, test_local_optimizer_parity) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for (const bool maximize : kBooleans) {
      for (const Kind& kind : kinds(maximize)) {
        leaves.run(parity::text("maximize", maximize) + kind.name, [&] {
          check_local_optimizer_parity(world, kind.make);
        });
      }
    }
  });
}

/// By iteration, then by parameter.
using Record = std::vector<Params>;

/// Sends what rank `root` recorded to every rank.
Record broadcast(const Group& world, Record record, const Params& like) {
  const int root = world.size() - 1;
  record.resize(2 * (2 + world.size()));
  for (Params& tensors : record) {
    for (size_t i = 0; i < like.size(); ++i) {
      if (world.rank() != root) {
        tensors.push_back(torch::empty_like(like[i]).detach());
      }
      world.broadcast(tensors[i], root);
    }
  }
  return record;
}

void set_gradients(ZeroRedundancyOptimizer& zero, const Params& gradients) {
  const auto& params = zero.param_groups()[0].params();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = gradients[i].clone();
  }
}

/// Sets the recorded gradients on a rank that has no more inputs.
class GradientSetter : public Joinable {
 public:
  GradientSetter(Group group, at::Device device)
      : group_(std::move(group)), device_(device) {}

  std::unique_ptr<JoinHook> join_hook(const JoinArguments& arguments) override {
    struct Hook : JoinHook {
      void main_hook() override {
        set_gradients(*zero, gradients.at(next++));
      }
      ZeroRedundancyOptimizer* zero;
      Record gradients;
      size_t next = 0;
    };
    auto hook = std::make_unique<Hook>();
    hook->zero = std::any_cast<ZeroRedundancyOptimizer*>(arguments.at("zero"));
    const auto& all = std::any_cast<const Record&>(arguments.at("grads"));
    const int num_left = 2 * (group_.size() - group_.rank() - 1);
    hook->gradients.assign(all.end() - num_left, all.end());
    return hook;
  }
  at::Device join_device() const override {
    return device_;
  }
  Group join_process_group() const override {
    return group_;
  }

 private:
  Group group_;
  at::Device device_;
};

/// With models, inputs and joins on `device`.
void check_zero_join(const Group& world, at::Device device) {
  constexpr int kEpochs = 2;
  torch::manual_seed(0);
  auto model = linears({{2, 3}, {3, 3}, {3, 3}}, device);
  auto zero_model = linears({{2, 3}, {3, 3}, {3, 3}}, device);
  copy_values(*model, *zero_model);
  Params inputs;
  for (int i = 0; i < 3 + world.rank(); ++i) {
    inputs.push_back(torch::randn({20, 2}).to(device));
  }
  const at::Tensor labels = torch::randn({20, 3}).to(device);

  DistributedDataParallel ddp(model);
  optim::Adam plain(model->parameters(), 0.01);
  Record grads;
  Record params;
  Join::run({&ddp}, [&] {
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (const at::Tensor& input : inputs) {
        torch::mse_loss(ddp(input), labels).backward();
        plain.step();
        if (world.rank() == world.size() - 1) {
          auto& gradient = grads.emplace_back();
          auto& param = params.emplace_back();
          for (const at::Tensor& each : model->parameters()) {
            gradient.push_back(each.grad().clone());
            param.push_back(each.detach().clone());
          }
        }
      }
    }
  });
  grads = broadcast(world, std::move(grads), model->parameters());
  params = broadcast(world, std::move(params), model->parameters());

  ZeroRedundancyOptimizer zero(
      zero_model->parameters(), optimizer_class<optim::Adam>(0.01));
  GradientSetter setter(world, device);
  EXPECT_EQ(zero.join_device().type(), device.type());
  EXPECT_EQ(ddp.join_device().type(), device.type());
  size_t iteration = 0;
  Join::run(
      {&setter, &zero},
      [&] {
        for (int epoch = 0; epoch < kEpochs; ++epoch) {
          for (size_t i = 0; i < inputs.size(); ++i) {
            Join::notify_join_context(setter);
            set_gradients(zero, grads[iteration]);
            zero.step();
            const auto now = zero_model->parameters();
            for (size_t j = 0; j < now.size(); ++j) {
              EXPECT_TRUE(is_close(now[j].detach(), params[iteration][j]));
            }
            ++iteration;
          }
        }
      },
      JoinOptions().arguments({{"zero", &zero}, {"grads", grads}}));
  // Stronger: ranks that finished early have the last values too.
  const auto now = zero_model->parameters();
  for (size_t j = 0; j < now.size(); ++j) {
    EXPECT_TRUE(is_close(now[j].detach(), params.back()[j]));
  }
}

TEST(TestZeroRedundancyOptimizerDistributed, test_zero_join_gpu) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "this test wants a CUDA device";
  }
  const at::Device device(at::kCUDA, 0);
  on_two_and_four_ranks(
      [&](const Group& world, LeafRuns& leaves) {
        leaves.run("", [&] { check_zero_join(world, device); });
      },
      device);
}

TEST(TestZeroRedundancyOptimizerDistributed, test_zero_join_cpu) {
  const at::Device device(at::kCPU);
  on_two_and_four_ranks(
      [&](const Group& world, LeafRuns& leaves) {
        leaves.run("", [&] { check_zero_join(world, device); });
      },
      device);
}

} // namespace
} // namespace tessera
