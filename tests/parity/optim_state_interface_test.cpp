// test/distributed/fsdp/test_fsdp_optim_state.py, class TestFSDPOptimState:
// optim_state_dict() and optim_state_dict_to_load() with unusual state.
#include <tessera/optim/adam.h>
#include <tessera/optim/sgd.h>
#include <tessera/optim/state_dict.h>

#include "parity/nested_model.h"
#include "parity/optim_state_support.h"
#include "support/device.h"

namespace tessera {
namespace {

using parity::DummyModel;
using parity::DummyModelImpl;
using parity::expect_same_state;
using parity::is_close;
using parity::kBooleans;
using parity::LeafRuns;
using parity::on_two_and_four_ranks;
using parity::text;
using tessera::testing::test_device;
using torch::nn::Linear;

constexpr double kLearningRate = 1e-2;

// --- test_save_load_without_0th_param_state

struct UnusedFirstImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return torch::relu(lin2(x));
  }

  Linear lin1 = register_module("lin1", Linear(5, 5));
  Linear lin2 = register_module("lin2", Linear(5, 5));
};
TORCH_MODULE(UnusedFirst);

void check_without_0th_param_state(StateDictType type) {
  torch::manual_seed(0);
  UnusedFirst module;
  module->to(test_device());
  parity::fsdp(module->lin1.ptr(), {});
  parity::fsdp(module->lin2.ptr(), {});
  const FSDP model(module);
  optim::Adam optim(parameters(*model), kLearningRate);
  const auto train = [&] {
    model(torch::randn({2, 5}).to(test_device())).sum().backward();
    optim.step();
  };
  train();

  const StateDict before = optim::state_dict(optim).clone();
  EXPECT_FALSE(before.at("state").dict().contains(0));
  EXPECT_TRUE(before.at("state").dict().contains(1));
  const StateDict loadable = type == StateDictType::FullStateDict
      ? shard_full_optim_state_dict(
            full_optim_state_dict(
                *model, optim, FullOptimStateOptions().rank0_only(false)),
            *model)
      : flatten_sharded_optim_state_dict(
            sharded_optim_state_dict(*model, optim), *model, optim);
  optim::load_state_dict(optim, loadable);
  // Stronger: the way there and back changed nothing.
  EXPECT_FALSE(loadable.at("state").dict().contains(0));
  EXPECT_TRUE(is_close(optim::state_dict(optim), before));
  train();
}

TEST(TestFSDPOptimState, test_save_load_without_0th_param_state) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("full", [] {
      check_without_0th_param_state(StateDictType::FullStateDict);
    });
    leaves.run("sharded", [] {
      check_without_0th_param_state(StateDictType::ShardedStateDict);
    });
  });
}

// --- test_optim_state_without_param_groups

void zero_gradients(torch::nn::Module& model) {
  for (const at::Tensor& param : parameters(model)) {
    if (param.requires_grad()) {
      param.mutable_grad() = torch::zeros_like(param);
    }
  }
}

struct SimpleModelImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return net1->forward(x);
  }

  parity::Chain net1 =
      register_module("net1", parity::Chain(Linear(2, 4), torch::nn::ReLU()));
};
TORCH_MODULE(SimpleModel);

TEST(TestFSDPOptimState, test_optim_state_without_param_groups) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      torch::manual_seed(0);
      SimpleModel module;
      module->to(test_device());
      const FSDP model(module);
      optim::Adam optim(parameters(*model), kLearningRate);
      const at::Tensor batch = torch::rand({3, 2}).to(test_device());
      const auto train = [&] {
        zero_gradients(*model);
        optim.step();
        model(batch).sum().backward();
      };
      train();

      const StateDict original = optim::state_dict(optim).clone();
      StateDict without_groups = original.clone();
      const StateValue groups = without_groups.at("param_groups").clone();
      without_groups.erase("param_groups");
      const StateDict saved =
          optim_state_dict(
              *model,
              optim,
              OptimStateOptions().optim_state_dict(without_groups))
              .clone();
      EXPECT_FALSE(saved.contains("param_groups"));

      train();
      EXPECT_FALSE(is_close(optim::state_dict(optim), original)); // other state
      StateDict loadable = optim_state_dict_to_load(*model, optim, saved);
      EXPECT_FALSE(loadable.contains("param_groups"));
      loadable.set("param_groups", groups);
      optim::load_state_dict(optim, loadable);
      EXPECT_TRUE(is_close(optim::state_dict(optim), original));
      expect_same_state(optim_state_dict(*model, optim), saved);
      EXPECT_EQ(optim::state_dict(optim).at("param_groups"), groups);
    });
  });
}

// --- tests of the dummy model

FSDP<DummyModelImpl> shard_dummy(const FSDPOptions& options, bool no_grad) {
  DummyModel module(no_grad);
  module->to(test_device());
  return FSDP(module, options);
}

/// One step, with the output as its own gradient.
void step_dummy(
    const FSDP<DummyModelImpl>& model,
    torch::optim::Optimizer& optim) {
  const at::Tensor output = model(DummyModelImpl::input().to(test_device()));
  output.backward(output.detach());
  optim.step();
}

TEST(TestFSDPOptimState, test_with_empty_optimizer_state) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      const auto model = shard_dummy({}, /*no_grad=*/false);
      const optim::Adam optim(parameters(*model), kLearningRate);
      const StateDict own = optim::state_dict(optim);
      const StateDict saved = optim_state_dict(*model, optim);
      EXPECT_TRUE(own.at("state").dict().empty());
      EXPECT_EQ(saved.at("state"), own.at("state"));
    });
  });
}

/// Calls `check` with each value of each parameter's state; there are 8
/// parameters with 3 values.
void for_each_state(
    const StateDict& osd,
    const std::function<void(const StateValue&)>& check) {
  int count = 0;
  for (const auto& [param, state] : osd.at("state").dict()) {
    for (const auto& [name, value] : state.dict()) {
      SCOPED_TRACE(param.text() + " " + name.text());
      check(value);
      ++count;
    }
  }
  EXPECT_EQ(count, 8 * 3);
}

void expect_full_on_cpu(const StateValue& value) {
  ASSERT_TRUE(value.is_tensor());
  EXPECT_TRUE(value.tensor().is_cpu());
}

void expect_sharded_on_device(const StateValue& value) {
  if (value.is_tensor()) {
    EXPECT_EQ(value.tensor().dim(), 0); // step
    return;
  }
  ASSERT_TRUE(value.is_sharded());
  EXPECT_GE(value.sharded().sizes().size(), 1u);
  for (const ShardedTensor::Piece& piece : value.sharded().pieces()) {
    EXPECT_EQ(piece.tensor.device(), test_device());
  }
}

TEST(TestFSDPOptimState, test_interface_arguments) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      const auto model = shard_dummy({}, /*no_grad=*/false);
      optim::Adam optim(parameters(*model), kLearningRate);
      step_dummy(model, optim);
      const StateDict original = optim::state_dict(optim).clone();
      const OptimStateOptions options =
          OptimStateOptions().optim_state_dict(original);
      const StateDict saved = optim_state_dict(*model, optim, options);
      expect_same_state(optim_state_dict(*model, optim), saved);

      step_dummy(model, optim);
      EXPECT_FALSE(is_close(optim::state_dict(optim), original));
      optim_state_dict_to_load(
          *model, optim, saved, OptimStateToLoadOptions().load_directly(true));
      expect_same_state(optim::state_dict(optim), original);

      for_each_state(
          optim_state_dict(*model, optim, options), expect_full_on_cpu);
      {
        const StateDictTypeGuard guard(
            *model,
            StateDictType::ShardedStateDict,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig().offload_to_cpu(false));
        for_each_state(
            optim_state_dict(*model, optim, options), expect_sharded_on_device);
      }
      {
        const StateDictTypeGuard guard(
            *model,
            StateDictType::FullStateDict,
            FullStateDictConfig(),
            FullOptimStateDictConfig().offload_to_cpu(true).rank0_only(true));
        const StateDict osd = optim_state_dict(*model, optim, options);
        if (world.rank() == 0) {
          for_each_state(osd, expect_full_on_cpu);
        } else {
          EXPECT_TRUE(osd.empty()) << osd;
        }
      }
    });
  });
}

// --- test_state_dict_with_none_tensor_state

/// Entries for the parameters of which this rank has something: SGD without
/// momentum makes none by itself.
void add_missing_entries(
    StateDict& osd,
    const std::vector<at::Tensor>& params) {
  StateDict& state = osd.at("state").dict();
  for (size_t id = 0; id < params.size(); ++id) {
    if (params[id].numel() > 0 && !state.contains(id)) {
      state.set(id, StateDict());
    }
  }
}

void check_none_tensor_state(bool use_orig_params, bool has_tensor_state) {
  const auto model = shard_dummy(
      FSDPOptions().use_orig_params(use_orig_params), /*no_grad=*/false);
  const auto params = parameters(*model);
  std::unique_ptr<torch::optim::Optimizer> optim;
  if (has_tensor_state) {
    optim = std::make_unique<optim::Adam>(params, kLearningRate);
  } else {
    optim = std::make_unique<optim::SGD>(params, kLearningRate);
  }
  step_dummy(model, *optim);
  StateDict original = optim::state_dict(*optim).clone();
  add_missing_entries(original, params);
  StateDict& entries = original.at("state").dict();
  for (const StateKey& id : entries.keys()) {
    entries.at(id).dict().set("value1", 2.74);
    entries.at(id).dict().set("value2", StateValue());
  }

  const StateDict saved = optim_state_dict(
      *model, *optim, OptimStateOptions().optim_state_dict(original));
  EXPECT_EQ(saved.at("state").dict().size(), 8u);
  const StateDict loadable = optim_state_dict_to_load(*model, *optim, saved);
  // Stronger: all of it came back.
  EXPECT_EQ(loadable.at("state").dict().size(), entries.size());
  expect_same_state(loadable, original);
  for (const auto& [id, state] : loadable.at("state").dict()) {
    EXPECT_EQ(state.dict().at("value1"), StateValue(2.74)) << id.text();
    EXPECT_TRUE(state.dict().at("value2").is_none()) << id.text();
  }
}

TEST(TestFSDPOptimState, test_state_dict_with_none_tensor_state) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    for (const bool use_orig_params : kBooleans) {
      for (const bool has_tensor_state : kBooleans) {
        leaves.run(
            text("use_orig_params", use_orig_params) +
                text("optimizer_has_tensor_state", has_tensor_state),
            [&] {
              check_none_tensor_state(use_orig_params, has_tensor_state);
            });
      }
    }
  });
}

TEST(TestFSDPOptimState, test_with_no_shard) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    for (const bool use_orig_params : kBooleans) {
      leaves.run(text("use_orig_params", use_orig_params), [&] {
        const auto model = shard_dummy(
            FSDPOptions()
                .sharding_strategy(ShardingStrategy::NoShard)
                .use_orig_params(use_orig_params),
            /*no_grad=*/false);
        optim::Adam optim(parameters(*model), kLearningRate);
        step_dummy(model, optim);
        const StateDict original = optim::state_dict(optim).clone();
        EXPECT_FALSE(original.at("state").dict().empty());
        const StateDict saved = optim_state_dict(*model, optim);
        optim::load_state_dict(
            optim, optim_state_dict_to_load(*model, optim, saved));
        EXPECT_TRUE(is_close(optim::state_dict(optim), original));
      });
    }
  });
}

// --- test_no_grad

double step_of(const StateDict& osd, const char* param) {
  return osd.at("state")
      .dict()
      .at(param)
      .dict()
      .at("step")
      .tensor()
      .item<double>();
}

/// net1 is frozen in iterations 0, 2 and 4: it has no state at first, and later
/// state of fewer steps than the rest of its unit.
void check_frozen_steps(const StateDict& osd, int iteration) {
  const int steps = (iteration + 1) / 2;
  for (const char* param : {"net1.0.weight", "net1.0.bias"}) {
    const bool has_state = osd.at("state").dict().contains(param);
    EXPECT_EQ(has_state, steps > 0) << param;
    if (has_state) {
      EXPECT_EQ(step_of(osd, param), steps) << param;
    }
  }
  EXPECT_EQ(step_of(osd, "net3.weight"), iteration + 1);
}

TEST(TestFSDPOptimState, test_no_grad) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      const auto model =
          shard_dummy(FSDPOptions().use_orig_params(true), /*no_grad=*/true);
      optim::Adam optim(parameters(*model), kLearningRate);
      for (int i = 0; i < 5; ++i) {
        SCOPED_TRACE("iteration " + std::to_string(i));
        const torch::nn::LinearImpl& first = model->first_linear();
        set_requires_grad(first.weight, i % 2 == 1);
        set_requires_grad(first.bias, i % 2 == 1);
        model(DummyModelImpl::input().to(test_device())).sum().backward();
        optim.step();
        const StateDict original = optim::state_dict(optim).clone();
        const StateDict saved = optim_state_dict(*model, optim);
        check_frozen_steps(saved, i);
        optim_state_dict_to_load(
            *model,
            optim,
            saved,
            OptimStateToLoadOptions().load_directly(true));
        expect_same_state(optim::state_dict(optim), original);
      }
    });
  });
}

} // namespace
} // namespace tessera
