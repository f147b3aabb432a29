// test/distributed/fsdp/test_fsdp_optim_state.py, class TestFSDPOptimState: an
// optimizer that has names for its parameters, and parameters that one rank
// has alone.
#include <tessera/optim/adam.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>

#include "parity/nested_model.h"
#include "parity/optim_state_support.h"
#include "support/device.h"

namespace tessera {
namespace {

using parity::Chain;
using parity::DummyModel;
using parity::expect_same_param_groups;
using parity::expect_same_state;
using parity::Keys;
using parity::LeafRuns;
using parity::on_two_and_four_ranks;
using tessera::testing::test_device;

constexpr double kLearningRate = 1e-2;

/// A sharded part, and before it one that is never sharded: rank 0 has another
/// one than the rest, under another name.
struct PartlyShardedImpl : torch::nn::Module {
  explicit PartlyShardedImpl(const Group& group) : world(group) {
    dense = register_module("dense", DummyModel()); // seeds
    sparse = register_module(
        sparse_name(), Chain(torch::nn::Linear(8, 8), torch::nn::ReLU()));
    to(test_device());
    parity::fsdp(dense.ptr(), FSDPOptions().use_orig_params(true));
  }

  std::string sparse_name() const {
    return world.rank() == 0 ? "sparse0" : "sparse1";
  }

  /// Activations are added up; the gradient is that of the own part.
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor own = sparse->forward(x);
    const at::Tensor sum = own.detach().clone();
    world.all_reduce(sum);
    return dense(own + (sum - own.detach()));
  }

  Group world;
  DummyModel dense{nullptr};
  Chain sparse{nullptr};
};
TORCH_MODULE(PartlySharded);

/// One iteration. Gradients add up, as in PyTorch's test.
void train(
    PartlySharded& model,
    torch::optim::Optimizer& optim,
    const at::Tensor& batch) {
  model(batch).sum().backward();
  optim.step();
}

/// A step with zero gradients, so that there is state, and one iteration.
void train_first(
    PartlySharded& model,
    torch::optim::Optimizer& optim,
    const at::Tensor& batch) {
  for (const at::Tensor& param : parameters(*model)) {
    param.mutable_grad() = torch::zeros_like(param);
  }
  optim.step();
  train(model, optim, batch);
}

TEST(TestFSDPOptimState, test_compatible_with_trec) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      PartlySharded model1(world);
      PartlySharded model2(world);
      optim::Adam optim1(parameters(*model1), kLearningRate);
      optim::NamedOptimizer optim2(
          named_parameters(*model2),
          std::make_unique<optim::Adam>(parameters(*model2), kLearningRate));
      const auto draw = [] { return torch::rand({5, 8}).to(test_device()); };
      const at::Tensor batch = draw();
      train_first(model1, optim1, batch);
      train_first(model2, optim2, batch);
      const StateDict osd1 = optim_state_dict(*model1, optim1).clone();
      const StateDict osd2 = optim_state_dict(*model2, optim2).clone();
      expect_same_param_groups(osd1, osd2, Keys::Any);
      expect_same_state(osd1, osd2);
      EXPECT_TRUE(osd1.at("state").dict().contains(
          model1->sparse_name() + ".0.weight"));

      for (int i = 0; i < 5; ++i) {
        train(model2, optim2, draw());
      }
      EXPECT_FALSE(parity::is_close(optim_state_dict(*model2, optim2), osd2));
      const StateDict loadable = optim_state_dict_to_load(
          *model2,
          optim2,
          osd2,
          OptimStateToLoadOptions().is_named_optimizer(true));
      for (const StateKey& key : loadable.at("state").dict().keys()) {
        EXPECT_FALSE(key.is_id()) << key.text();
      }
      optim::load_state_dict(optim2, loadable);
      const StateDict again = optim_state_dict(*model2, optim2);
      expect_same_param_groups(osd1, again, Keys::Any);
      expect_same_state(osd1, again);
    });
  });
}

} // namespace
} // namespace tessera
