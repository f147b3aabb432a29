// test/distributed/optim/test_zero_redundancy_optimizer.py: a sharded optimizer
// steps as a plain one does.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <algorithm>
#include <any>
#include <memory>
#include <utility>
#include <vector>

#include "base/byte_vector.h"
#include "parity/support.h"
#include "parity/zero_support.h"
#include "support/device.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using optim::AdamWOptions;
using optim::SGDOptions;
using parity::copy_values;
using parity::expect_throws;
using parity::is_close;
using parity::kBooleans;
using parity::LeafRuns;
using parity::linears;
using parity::on_two_and_four_ranks;
using tessera::testing::on_ranks;
using tessera::testing::test_device;
using torch::optim::OptimizerParamGroup;

using Params = std::vector<at::Tensor>;
using Groups = std::vector<OptimizerParamGroup>;
using Closure = torch::optim::Optimizer::LossClosure;

MakeOptimizer sgd(double lr) {
  return optimizer_class<optim::SGD>(lr);
}

MakeOptimizer sgd(const SGDOptions& options) {
  return optimizer_class<optim::SGD>(options);
}

at::Tensor device_tensor(std::vector<float> values) {
  return torch::tensor(values, at::TensorOptions(test_device()));
}

/// A leaf that asks for a gradient.
at::Tensor leaf(std::vector<float> values) {
  return device_tensor(std::move(values)).requires_grad_(true);
}

Params weights_of(const torch::nn::Sequential& model) {
  Params weights;
  for (const auto& layer : *model) {
    weights.push_back(layer.get<torch::nn::LinearImpl>().weight);
  }
  return weights;
}

Params biases_of(const torch::nn::Sequential& model) {
  Params biases;
  for (const auto& layer : *model) {
    biases.push_back(layer.get<torch::nn::LinearImpl>().bias);
  }
  return biases;
}

int64_t local_numel(ZeroRedundancyOptimizer& zero) {
  int64_t numel = 0;
  for (const auto& group : zero.optim().param_groups()) {
    for (const at::Tensor& param : group.params()) {
      numel += param.numel();
    }
  }
  return numel;
}

const StateDict& local_state(
    ZeroRedundancyOptimizer& zero,
    const at::Tensor& param) {
  const StateDict* state =
      dynamic_cast<optim::Optimizer&>(zero.optim()).find_state(param);
  TORCH_CHECK(state != nullptr, "no state");
  return *state;
}

// The steps of one rank.

class TestZeroRedundancyOptimizerSingleRank : public ::testing::Test {
 protected:
  /// Runs a test that has one leaf run.
  static void run(const std::function<void()>& body) {
    on_ranks(1, [&](const Group& world) {
      LeafRuns leaves(world);
      leaves.run("", body);
    });
  }
};

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_state_dict) {
  run([] {
    const at::Tensor x = leaf({1.0});
    ZeroRedundancyOptimizer first({x}, sgd(SGDOptions(0.1).momentum(0.9)));
    x.backward();
    first.step();
    EXPECT_TRUE(is_close(x, device_tensor({0.9})));
    EXPECT_TRUE(is_close(
        local_state(first, x).at("momentum_buffer").tensor(),
        device_tensor({1.0})));

    first.zero_grad();
    expect_throws<c10::Error>(
        [&] { first.state_dict(); },
        "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to=...)`");
    first.consolidate_state_dict(0);
    const StateDict saved = first.state_dict();
    EXPECT_TRUE(saved.contains("param_groups"));
    EXPECT_TRUE(saved.contains("state"));
    const StateDict& group = saved.at_path("param_groups.0").dict();
    EXPECT_EQ(group.at("lr").to_double(), 0.1);
    EXPECT_EQ(group.at("momentum").to_double(), 0.9);
    EXPECT_FALSE(group.at("nesterov").to_bool());
    EXPECT_EQ(group.at("weight_decay").to_double(), 0.0);
    EXPECT_EQ(group.at("dampening").to_double(), 0.0);
    // Every key of the exposed group: what a plain optimizer of that group has.
    const optim::SGD plain(first.param_groups(), SGDOptions(0.5));
    StateDict exposed = plain.state_dict().at_path("param_groups.0").dict();
    EXPECT_EQ(group.keys(), exposed.keys());
    EXPECT_GE(exposed.size(), 10u);
    for (const auto& [key, value] : exposed) {
      if (!(key == StateKey("params"))) {
        EXPECT_EQ(group.at(key), value) << key.text();
      }
    }

    ZeroRedundancyOptimizer second({x}, sgd(0.01));
    second.load_state_dict(saved);
    EXPECT_TRUE(is_close(
        local_state(second, x).at("momentum_buffer").tensor(),
        device_tensor({1.0})));
    EXPECT_EQ(second.param_groups()[0].options().get_lr(), 0.1);
    x.backward();
    second.step();
    EXPECT_TRUE(is_close(x, device_tensor({0.71})));
    EXPECT_TRUE(is_close(
        local_state(second, x).at("momentum_buffer").tensor(),
        device_tensor({1.9})));
    EXPECT_EQ(second.param_groups()[0].params()[0].device(), x.device());
  });
}

enum class Order { ClearThenStep, StepThenClear };

/// A scheduler drives a sharded optimizer as it drives a plain one.
void check_lr_scheduler(Order order) {
  const at::Tensor x = leaf({1.0});
  const at::Tensor x2 = leaf({1.0});
  ZeroRedundancyOptimizer zero({x}, sgd(0.01));
  optim::SGD plain({x2}, 0.01);
  torch::optim::StepLR zero_scheduler(zero, 1);
  torch::optim::StepLR plain_scheduler(plain, 1);
  const auto iterate = [&](const at::Tensor& param,
                           torch::optim::Optimizer& optimizer,
                           torch::optim::StepLR& scheduler) {
    param.backward();
    if (order == Order::ClearThenStep) {
      optimizer.zero_grad();
      optimizer.step();
    } else {
      optimizer.step();
      optimizer.zero_grad();
    }
    scheduler.step();
  };
  for (int i = 0; i < 5; ++i) {
    iterate(x, zero, zero_scheduler);
    iterate(x2, plain, plain_scheduler);
    EXPECT_TRUE(is_close(x, x2));
    EXPECT_EQ(
        zero.param_groups()[0].options().get_lr(),
        plain.param_groups()[0].options().get_lr());
  }
  // LibTorch counts from 0: the first of the 5 steps changes nothing.
  EXPECT_NEAR(zero.param_groups()[0].options().get_lr(), 1e-6, 1e-14);
  EXPECT_EQ(
      torch::equal(x, torch::ones_like(x)), order == Order::ClearThenStep);
}

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_lr_scheduler) {
  run([] {
    check_lr_scheduler(Order::ClearThenStep);
    check_lr_scheduler(Order::StepThenClear);
  });
}

/// Its step takes a list and adds a 5 to it.
struct SGDWithStepKwarg : optim::SGD, StepTakesExtra {
  using SGD::SGD;
  at::Tensor step_with(Closure closure, const std::any& extra) override {
    std::any_cast<std::vector<int>*>(extra)->push_back(5);
    return step(std::move(closure));
  }
};

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_step_with_kwargs) {
  run([] {
    std::vector<int> kwarg;
    const at::Tensor x = leaf({1.0});
    ZeroRedundancyOptimizer zero({x}, optimizer_class<SGDWithStepKwarg>(0.1));
    x.backward();
    zero.step(nullptr, &kwarg);
    EXPECT_EQ(kwarg, std::vector<int>{5});
    EXPECT_TRUE(is_close(x, device_tensor({0.9})));

    ZeroRedundancyOptimizer other({x}, sgd(0.1));
    expect_throws<c10::TypeError>(
        [&] { other.step(nullptr, &kwarg); }, "Derive its class from");
  });
}

/// Its step adds a key to its options.
struct SGDWithNewKey : optim::SGD {
  using SGD::SGD;
  at::Tensor step(Closure closure = nullptr) override {
    at::Tensor loss = SGD::step(std::move(closure));
    static_cast<SGDOptions&>(param_groups()[0].options()).extra("new_key", 0.1);
    return loss;
  }
};

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_step_with_extra_inner_key) {
  run([] {
    const at::Tensor x = leaf({1.0});
    ZeroRedundancyOptimizer zero({x}, optimizer_class<SGDWithNewKey>(0.1));
    x.backward();
    zero.step();
    const auto& options =
        static_cast<SGDOptions&>(zero.param_groups()[0].options());
    EXPECT_EQ(options.extra().at("new_key").to_double(), 0.1);
    EXPECT_TRUE(is_close(x, device_tensor({0.9})));
    zero.consolidate_state_dict();
    EXPECT_EQ(
        zero.state_dict().at_path("param_groups.0.new_key").to_double(), 0.1);
  });
}

/// Its step takes no closure.
struct SGDWithoutClosure : optim::SGD {
  using SGD::SGD;
  at::Tensor step(Closure closure = nullptr) override {
    TORCH_CHECK(closure == nullptr, "a closure was passed");
    return SGD::step();
  }
};

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_step_without_closure) {
  run([] {
    const at::Tensor x = leaf({1.0});
    ZeroRedundancyOptimizer zero({x}, optimizer_class<SGDWithoutClosure>(0.1));
    x.backward();
    zero.step();
    EXPECT_TRUE(is_close(x, device_tensor({0.9})));
  });
}

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_zero_grad) {
  run([] {
    torch::manual_seed(0);
    const at::Tensor x = torch::rand(1).to(test_device());
    torch::nn::Linear m(1, 1);
    m->to(test_device());
    ZeroRedundancyOptimizer zero(m->parameters(), sgd(0.01));
    m->forward(x).backward(x);
    EXPECT_NE(m->weight.grad().item<float>(), 0);
    EXPECT_NE(m->bias.grad().item<float>(), 0);
    zero.zero_grad();
    EXPECT_FALSE(m->weight.grad().defined());
    EXPECT_FALSE(m->bias.grad().defined());
  });
}

/// True if these, in braces, can be the parameters.
template <class... Ts>
concept AreParameters = requires(const Ts&... values) {
  ZeroRedundancyOptimizer({values...}, sgd(0.01));
};
/// True if this can be the parameters.
template <class T>
concept IsParameters = requires(const T& value) {
  ZeroRedundancyOptimizer(value, sgd(0.01));
};

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_constructor) {
  on_ranks(1, [](const Group& world) {
    LeafRuns leaves(world);
    const auto m = linears({{5, 10}, {10, 10}, {10, 10}});
    const auto params = m->parameters();
    const auto with = [&](const at::Tensor& other) {
      Params list = params;
      list.push_back(other);
      return list;
    };
    leaves.run("empty list", [] {
      expect_throws<c10::ValueError>(
          [] { ZeroRedundancyOptimizer(Params(), sgd(0.01)); },
          "ZeroRedundancyOptimizer got an empty parameter list");
    });
    // Three inputs of Python's are TypeErrors there and do not compile here.
    // With each, what comes next to it at run time.
    leaves.run("bare tensor", [&] {
      static_assert(IsParameters<Params>);
      static_assert(!IsParameters<at::Tensor>);
      expect_throws<c10::TypeError>(
          [&] { ZeroRedundancyOptimizer(with(at::Tensor()), sgd(0.01)); },
          "params argument should be an iterable of Tensors");
    });
    leaves.run("number", [&] {
      static_assert(!IsParameters<float>);
      static_assert(!IsParameters<double>);
      expect_throws<c10::ValueError>(
          [&] { ZeroRedundancyOptimizer(with(params[0] * 2), sgd(0.01)); },
          "can't optimize a non-leaf Tensor");
    });
    leaves.run("parameters and a number", [&] {
      static_assert(AreParameters<at::Tensor, at::Tensor>);
      static_assert(!AreParameters<at::Tensor, at::Tensor, int>);
      expect_throws<c10::ValueError>(
          [&] {
            ZeroRedundancyOptimizer(
                Groups{OptimizerParamGroup(params), OptimizerParamGroup({})},
                sgd(0.01));
          },
          "param group 1 has no parameters");
    });
    leaves.run("two groups", [&] {
      ZeroRedundancyOptimizer(
          Groups{
              OptimizerParamGroup(weights_of(m)),
              OptimizerParamGroup(biases_of(m))},
          sgd(0.01));
    });
    leaves.run("one-pass sequence", [&] {
      ZeroRedundancyOptimizer(m->parameters(), sgd(0.01));
    });
    leaves.run("list", [&] { ZeroRedundancyOptimizer(params, sgd(0.01)); });
    leaves.run("groups with options", [&] {
      Groups groups;
      groups.emplace_back(
          weights_of(m),
          std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.0)));
      groups.emplace_back(
          biases_of(m),
          std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.01)));
      ZeroRedundancyOptimizer zero(
          groups,
          optimizer_class<optim::AdamW>(
              AdamWOptions(0.01).betas({0.9, 0.999}).eps(1e-8)));
      EXPECT_EQ(zero.param_groups().size(), 2u);
      EXPECT_EQ(zero.optim().param_groups().size(), 2u);
      const auto decay = [&](size_t group) {
        return static_cast<AdamWOptions&>(zero.param_groups()[group].options())
            .weight_decay();
      };
      EXPECT_EQ(decay(0), 0.0);
      EXPECT_EQ(decay(1), 0.01);
      EXPECT_EQ(zero.param_groups()[1].options().get_lr(), 0.01);
    });
  });
}

TEST_F(TestZeroRedundancyOptimizerSingleRank, test_same_dense_param_type) {
  on_ranks(1, [](const Group& world) {
    LeafRuns leaves(world);
    const at::Device device = test_device();
    const at::Tensor sparse =
        torch::sparse_coo_tensor(
            torch::zeros({2, 0}, at::kLong), torch::zeros({0}), {2, 3})
            .to(device);
    const at::Tensor single = torch::rand(1).to(device);
    const std::vector<Params> lists = {
        {sparse},
        {single, torch::rand(1, at::kDouble).to(device)},
        {single, torch::rand(1).to(device), sparse}};
    for (const Params& params : lists) {
      leaves.run(std::to_string(params.size()) + " parameters", [&] {
        expect_throws<c10::ValueError>(
            [&] { ZeroRedundancyOptimizer(params, sgd(0.01)); },
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters");
      });
    }
  });
}

// Two ranks, and four.

torch::nn::Linear linear_of(float weight, float bias) {
  torch::nn::Linear m(1, 1);
  m->to(test_device());
  const torch::NoGradGuard no_grad;
  m->weight.fill_(weight);
  m->bias.fill_(bias);
  return m;
}

void average_gradients(const Group& world, const torch::nn::Module& module) {
  for (const at::Tensor& param : module.parameters()) {
    world.all_reduce(param.grad());
    param.grad().div_(world.size());
  }
}

TEST(TestZeroRedundancyOptimizerDistributed, test_step) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      const at::Tensor x = device_tensor({world.rank() + 1.0f});
      auto m = linear_of(1.0, 2.0);
      auto m_zero = linear_of(1.0, 2.0);
      optim::SGD plain(m->parameters(), 0.01);
      ZeroRedundancyOptimizer zero(m_zero->parameters(), sgd(0.01));
      m->forward(x).backward(x);
      m_zero->forward(x).backward(x);
      average_gradients(world, *m);
      average_gradients(world, *m_zero);
      plain.step();
      zero.step();
      EXPECT_TRUE(is_close(m->weight, m_zero->weight));
      EXPECT_TRUE(is_close(m->bias, m_zero->bias));
      const bool two = world.size() == 2;
      EXPECT_NEAR(m_zero->weight.item<float>(), two ? 0.975 : 0.925, 1e-6);
      EXPECT_NEAR(m_zero->bias.item<float>(), two ? 1.985 : 1.975, 1e-6);
    });
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_step_with_closure) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for (const bool bucket_view : kBooleans) {
      leaves.run(parity::text("bucket view", bucket_view), [&] {
        const float value = world.rank() + 1.0f;
        const at::Tensor x = device_tensor({value});
        const at::Tensor target = device_tensor({value + 2 + 1});
        auto m = linear_of(1.0, 2.0);
        ZeroRedundancyOptimizer zero(
            m->parameters(),
            sgd(0.1),
            ZeroOptions().parameters_as_bucket_view(bucket_view));
        m->forward(x).backward(x);
        average_gradients(world, *m);
        const at::Tensor loss = zero.step([&] {
          zero.zero_grad();
          const at::Tensor output = m->forward(x);
          at::Tensor error = torch::l1_loss(output, target);
          error.backward();
          return error;
        });
        EXPECT_TRUE(is_close(loss, torch::ones_like(loss)));
        EXPECT_TRUE(is_close(m->weight, device_tensor({1.1}).view({1, 1})));
        EXPECT_TRUE(is_close(m->bias, device_tensor({2.1})));
      });
    }
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_lr_scheduler) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      check_lr_scheduler(Order::ClearThenStep);
      check_lr_scheduler(Order::StepThenClear);
    });
  });
}

/// Tensors of shapes (s, 1) for s in [9, 7, 5, 3], once per rank.
Params even_params(int num_ranks) {
  Params params;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (const int size : {9, 7, 5, 3}) {
      params.push_back(torch::rand({size, 1}).to(test_device()));
    }
  }
  return params;
}

TEST(TestZeroRedundancyOptimizerDistributed, test_sharding) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      ZeroRedundancyOptimizer zero(even_params(world.size()), sgd(0.01));
      EXPECT_EQ(zero.optim().param_groups().size(), 1u);
      EXPECT_EQ(local_numel(zero), 24);
    });
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_add_param_group) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    const auto add_group = [](ZeroRedundancyOptimizer& zero) {
      EXPECT_EQ(zero.param_groups().size(), 1u);
      zero.add_param_group(
          OptimizerParamGroup({torch::rand({3, 1}).to(test_device())}));
      EXPECT_EQ(zero.param_groups().size(), 2u);
      EXPECT_EQ(zero.optim().param_groups().size(), 2u);
    };
    leaves.run("all trainable", [&] {
      Params params = even_params(world.size());
      params.pop_back();
      for (const at::Tensor& param : params) {
        param.requires_grad_(true);
      }
      ZeroRedundancyOptimizer zero(params, sgd(0.01));
      add_group(zero);
      EXPECT_EQ(local_numel(zero), 24);
    });
    leaves.run("some trainable", [&] {
      Params params;
      for (const int size : {100, 3, 5, 2, 6, 4}) {
        params.push_back(torch::rand({size, 1})
                             .to(test_device())
                             .requires_grad_(size != 100));
      }
      ZeroRedundancyOptimizer zero(params, sgd(0.01));
      add_group(zero);
      if (world.size() == 2) {
        EXPECT_EQ(local_numel(zero), world.rank() == 0 ? 100 : 23);
      }
    });
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_multiple_param_groups) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      torch::manual_seed(0);
      std::vector<torch::nn::Sequential> models;
      for (int i = 0; i < 3; ++i) {
        models.push_back(linears({{5, 10}, {10, 10}, {10, 5}}));
        copy_values(*models.front(), *models.back());
      }
      Params inputs;
      for (int i = 0; i < 3; ++i) {
        inputs.push_back(torch::randn({8, 5}).to(test_device()));
      }
      const auto decayed = [](Params params, double weight_decay) {
        return OptimizerParamGroup(
            std::move(params),
            std::make_unique<AdamWOptions>(
                AdamWOptions().weight_decay(weight_decay)));
      };
      const auto groups_of = [&](const torch::nn::Sequential& model) {
        return Groups{
            decayed(weights_of(model), 0.0), decayed(biases_of(model), 0.01)};
      };
      ZeroRedundancyOptimizer at_once(
          groups_of(models[0]), optimizer_class<optim::AdamW>(0.01));
      ZeroRedundancyOptimizer one_by_one(
          weights_of(models[1]),
          optimizer_class<optim::AdamW>(AdamWOptions(0.01).weight_decay(0.0)));
      one_by_one.add_param_group(decayed(biases_of(models[1]), 0.01));
      optim::AdamW plain(groups_of(models[2]), 0.01);
      const std::vector<torch::optim::Optimizer*> optimizers = {
          &at_once, &one_by_one, &plain};
      for (const at::Tensor& input : inputs) {
        for (size_t i = 0; i < models.size(); ++i) {
          optimizers[i]->zero_grad();
          models[i]->forward(input).sum().backward();
          optimizers[i]->step();
        }
        const auto expected = models[0]->parameters();
        for (size_t i = 1; i < models.size(); ++i) {
          const auto params = models[i]->parameters();
          for (size_t j = 0; j < params.size(); ++j) {
            EXPECT_TRUE(is_close(params[j], expected[j]));
          }
        }
      }
    });
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_collect_shards) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      torch::manual_seed(0);
      auto model = linears({{20, 10}, {10, 5}});
      const at::Tensor target = torch::rand({3, 5}).to(test_device());
      const at::Tensor inputs = torch::rand({3, 20}).to(test_device());
      ZeroRedundancyOptimizer zero(
          model->parameters(), sgd(SGDOptions(1e-3).momentum(0.99)));
      zero.step([&] {
        zero.zero_grad();
        at::Tensor loss = torch::l1_loss(model->forward(inputs), target);
        loss.backward();
        return loss;
      });
      if (world.size() == 2) {
        EXPECT_EQ(local_numel(zero), world.rank() == 0 ? 200 : 65);
      }
      zero.consolidate_state_dict(0);
      Bytes bytes;
      if (world.rank() == 0) {
        EXPECT_EQ(zero.state_dict().at("state").dict().size(), 4u);
        bytes = state_dict_to_bytes(zero.state_dict());
      }
      zero.load_state_dict(
          state_dict_from_bytes(world.broadcast_bytes(bytes, 0)));
      // Stronger: what is loaded is what was saved.
      zero.consolidate_state_dict(world.size() - 1);
      bytes = world.broadcast_bytes(bytes, 0);
      if (world.rank() == world.size() - 1) {
        EXPECT_EQ(zero.state_dict(), state_dict_from_bytes(bytes));
      }
    });
  });
}

/// Two layers on devices of their own, where there are two.
struct ModelParallelImpl : torch::nn::Module {
  ModelParallelImpl(at::Device first, at::Device second)
      : device0(first), device1(second) {
    net0 = register_module("net0", torch::nn::Linear(10, 10));
    net1 = register_module("net1", torch::nn::Linear(10, 5));
    net0->to(device0);
    net1->to(device1);
  }
  at::Tensor forward(const at::Tensor& x) {
    return net1->forward(torch::relu(net0->forward(x.to(device0))).to(device1));
  }

  at::Device device0;
  at::Device device1;
  torch::nn::Linear net0{nullptr};
  torch::nn::Linear net1{nullptr};
};
TORCH_MODULE(ModelParallel);

/// Trainable parameters of one owner and device lie in one piece of memory.
void expect_in_buckets(ZeroRedundancyOptimizer& zero) {
  const auto& owned = zero.optim().param_groups()[0].params();
  for (const at::Tensor& a : owned) {
    for (const at::Tensor& b : owned) {
      EXPECT_EQ(a.is_alias_of(b), a.device() == b.device());
    }
    for (const at::Tensor& other : zero.param_groups()[0].params()) {
      const bool is_own =
          std::any_of(owned.begin(), owned.end(), [&](const auto& param) {
            return param.is_same(other);
          });
      if (!is_own) {
        EXPECT_FALSE(a.is_alias_of(other));
      }
    }
  }
}

/// Where the two layers go: to two GPUs, to the CPU and the only GPU, or both
/// to the CPU.
std::pair<at::Device, at::Device> two_devices() {
  const at::Device device = test_device();
  if (device.is_cuda() && torch::cuda::device_count() >= 2) {
    return {at::Device(at::kCUDA, 0), at::Device(at::kCUDA, 1)};
  }
  return {at::Device(at::kCPU), device};
}

TEST(TestZeroRedundancyOptimizerDistributed, test_zero_model_parallel) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    for (const bool bucket_view : kBooleans) {
      leaves.run(parity::text("bucket view", bucket_view), [&] {
        torch::manual_seed(0);
        const auto [device0, device1] = two_devices();
        ModelParallel mp(device0, device1);
        ModelParallel local(device0, device0);
        copy_values(*mp, *local);
        DistributedDataParallel ddp(mp);
        ZeroRedundancyOptimizer zero(
            mp->parameters(),
            optimizer_class<optim::Adam>(0.01),
            ZeroOptions().parameters_as_bucket_view(bucket_view));
        optim::Adam plain(local->parameters(), 0.01);
        if (bucket_view) {
          expect_in_buckets(zero);
        }
        Params inputs;
        for (int i = 0; i < 4; ++i) {
          inputs.push_back(torch::randn({20, 10}).to(device0));
        }
        const auto step = [&](torch::optim::Optimizer& optimizer,
                              auto& model,
                              const at::Tensor& input) {
          return optimizer
              .step([&] {
                optimizer.zero_grad();
                at::Tensor loss = model(input).abs().sum();
                loss.backward();
                return loss;
              })
              .cpu();
        };
        for (int epoch = 0; epoch < 2; ++epoch) {
          for (const at::Tensor& input : inputs) {
            const at::Tensor loss = step(zero, ddp, input);
            EXPECT_TRUE(
                torch::allclose(loss, step(plain, local, input), 1e-3, 1e-8));
            const auto params = mp->parameters();
            const auto expected = local->parameters();
            for (size_t i = 0; i < params.size(); ++i) {
              EXPECT_TRUE(torch::allclose(
                  params[i].cpu(), expected[i].cpu(), 1e-3, 1e-4));
            }
          }
        }
        if (bucket_view) {
          expect_in_buckets(zero);
        }
      });
    }
  });
}

TEST(TestZeroRedundancyOptimizerDistributed, test_nondefault_process_group) {
  on_ranks(4, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      const auto group = world.subgroup({0, 2});
      if (!group) {
        return;
      }
      torch::manual_seed(world.rank());
      auto model = linears({{20, 10}, {10, 5}});
      ZeroRedundancyOptimizer zero(
          model->parameters(),
          sgd(SGDOptions(1e-3).momentum(0.99)),
          ZeroOptions().process_group(*group));
      for (int epoch = 0; epoch < 5; ++epoch) {
        const at::Tensor target = torch::rand({3, 5}).to(test_device());
        const at::Tensor inputs = torch::rand({3, 20}).to(test_device());
        zero.step([&] {
          zero.zero_grad();
          at::Tensor loss =
              torch::l1_loss(model->forward(inputs), target) / world.size();
          loss.backward();
          group->all_reduce(loss.detach());
          return loss;
        });
        for (const at::Tensor& param : model->parameters()) {
          const at::Tensor all = torch::empty(
              {2, param.numel()}, at::TensorOptions(param.device()));
          group->all_gather_into(all, param.detach());
          EXPECT_TRUE(is_close(all[0], all[1]));
        }
      }
    });
  });
}

} // namespace
} // namespace tessera
