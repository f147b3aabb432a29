// Muon on whole matrices, and Muon beside AdamW.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include "optim/muon_model.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::error_of;
using tessera::testing::on_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

TEST(MuonTest, RejectsWhatIsNoMatrix) {
  const auto matrix = torch::ones({2, 3}).requires_grad_();
  const auto vector = torch::ones({4}).requires_grad_();
  const auto filter = torch::ones({2, 3, 4}).requires_grad_();
  EXPECT_THROW(Muon({matrix, vector}), c10::ValueError);
  EXPECT_THAT(
      error_of([&] {
        Muon({matrix, vector});
      }),
      AllOf(
          HasSubstr("[Muon] parameter \"1\""),
          HasSubstr("shape is [4]"),
          HasSubstr("muon_with_adamw")));
  Muon muon({matrix});
  EXPECT_THAT(
      error_of([&] { muon.add_param_group(OptimizerParamGroup({filter})); }),
      HasSubstr("shape is [2, 3, 4]"));
  EXPECT_EQ(muon.param_groups().size(), 1);
  NamedOptimizer named(
      {{"matrix", matrix}, {"vector", vector}},
      std::make_unique<Muon>(std::vector<at::Tensor>{matrix}));
  EXPECT_THAT(
      error_of([&] { named.add_param_group(OptimizerParamGroup({vector})); }),
      HasSubstr("shape is [4]"));
}

TEST(MuonTest, RejectsComplexMatricesAndSparseGradients) {
  const auto complex =
      torch::ones({2, 2}, torch::kComplexFloat).requires_grad_();
  EXPECT_THAT(error_of([&] { Muon({complex}); }), HasSubstr("complex"));
  const auto matrix = torch::ones({2, 2}).requires_grad_();
  Muon muon({matrix});
  matrix.mutable_grad() = torch::ones({2, 2}).to_sparse();
  EXPECT_THAT(error_of([&] { muon.step(); }), HasSubstr("sparse gradient"));
}

TEST(MuonTest, RejectsOptionsOutOfRange) {
  const std::vector<at::Tensor> params{torch::ones({2, 2}).requires_grad_()};
  const auto error = [&](const MuonOptions& options) {
    return error_of([&] { Muon(params, options); });
  };
  EXPECT_THAT(error(MuonOptions(-1)), HasSubstr("lr is -1"));
  EXPECT_THAT(error(MuonOptions().momentum(-1)), HasSubstr("momentum is -1"));
  EXPECT_THAT(
      error(MuonOptions().weight_decay(-1)), HasSubstr("weight_decay is -1"));
  EXPECT_THAT(error(MuonOptions().ns_steps(100)), HasSubstr("below 100"));
  EXPECT_THAT(
      error(MuonOptions().adjust_lr_fn("none")),
      HasSubstr("\"original\" or \"match_rms_adamw\""));
  Muon muon(params);
  EXPECT_THROW(muon.set_batch_bytes(0), c10::ValueError);
}

TEST(MuonTest, UpdatesAreNearlyOrthogonal) {
  torch::manual_seed(1);
  const auto param = torch::zeros({24, 16}).requires_grad_();
  Muon muon({param}, MuonOptions(1).weight_decay(0));
  param.mutable_grad() = torch::randn({24, 16});
  muon.step();
  const auto values = torch::linalg_svdvals(param.detach() / std::sqrt(1.5));
  EXPECT_GT(values.min().item<double>(), 0.5);
  EXPECT_LT(values.max().item<double>(), 1.5);
}

/// Python divides the momentum of bfloat16 matrices by its norm here.
TEST(MuonTest, MomentumInBfloat16IsTheAverageOfGradients) {
  torch::manual_seed(1);
  const auto param = torch::zeros({4, 4}, at::kBFloat16).requires_grad_();
  Muon muon({param}, MuonOptions().nesterov(false).momentum(0.5));
  param.mutable_grad() = torch::randn({4, 4}, at::kBFloat16);
  muon.step();
  EXPECT_TRUE(at::equal(
      muon.find_state(param)->at("momentum_buffer").tensor(),
      torch::zeros_like(param).lerp(param.grad(), 0.5)));
}

TEST(MuonTest, StridesOfAParameterDoNotMatter) {
  torch::manual_seed(1);
  const auto values = torch::randn({6, 4});
  const auto gradient = torch::randn({6, 4});
  const auto dense = values.clone().requires_grad_();
  const auto gaps = torch::zeros({6, 8}).slice(1, 0, 8, 2);
  gaps.copy_(values);
  const auto strided = gaps.detach().requires_grad_();
  Muon muon({dense, strided});
  dense.mutable_grad() = gradient;
  strided.mutable_grad() = gradient;
  muon.step();
  EXPECT_FALSE(strided.is_contiguous());
  EXPECT_TRUE(at::equal(dense, strided));
}

TEST(MuonTest, DictionaryGoesRound) {
  Matrices first;
  Muon muon(
      first->parameters(), MuonOptions(0.02).adjust_lr_fn("match_rms_adamw"));
  set_gradients(first, 0);
  muon.step();
  Matrices second;
  Muon other(second->parameters());
  other.load_state_dict(muon.state_dict());
  EXPECT_EQ(diff_state_dicts(other.state_dict(), muon.state_dict()), "");

  AdamW adamw(first->parameters());
  adamw.step();
  EXPECT_THAT(
      error_of([&] { other.load_state_dict(adamw.state_dict()); }),
      HasSubstr("which Muon does not keep"));
  auto dict = muon.state_dict().clone();
  dict.at("param_groups")
      .list()
      .at(0)
      .dict()
      .set("ns_coefficients", StateList{1.0, 2.0});
  EXPECT_THAT(
      error_of([&] { other.load_state_dict(dict); }),
      HasSubstr("three numbers are expected, it has 2"));
}

TEST(MuonTest, InitialStateIsZeros) {
  Matrices model;
  Muon muon(model->parameters());
  muon.initialize_state();
  for (const at::Tensor& param : model->parameters()) {
    EXPECT_TRUE(at::equal(
        muon.find_state(param)->at("momentum_buffer").tensor(),
        torch::zeros_like(param)));
  }
}

TEST(MuonTest, ZeroDividesItsState) {
  on_ranks(2, [](const Group&) {
    Matrices plain;
    Muon muon(plain->parameters(), 0.02);
    Matrices model;
    DistributedDataParallel ddp(model);
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<Muon>(MuonOptions(0.02)));
    for (int step = 0; step < 3; ++step) {
      set_gradients(plain, step);
      set_gradients(model, step);
      muon.step();
      zero.step();
    }
    const auto wanted = plain->parameters();
    const auto found = model->parameters();
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
    }
  });
}

/// An embedding with a tied output layer, a filter, norms and two matrices.
struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    torch::manual_seed(2);
    words = register_module("words", torch::nn::Embedding(9, 4));
    head = register_parameter("head", words->weight); // the name comes first
    filter = register_module(
        "filter", torch::nn::Conv1d(torch::nn::Conv1dOptions(4, 4, 3)));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    up = register_module("up", torch::nn::Linear(4, 8));
    down = register_module("down", torch::nn::Linear(8, 4));
  }
  torch::nn::Embedding words{nullptr};
  at::Tensor head;
  torch::nn::Conv1d filter{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};
TORCH_MODULE(Zoo);

/// The names of an optimizer's parameters.
std::vector<std::string> names_in(
    Zoo& model,
    const torch::optim::Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const at::Tensor& param : optimizer.param_groups().at(0).params()) {
    for (const auto& [name, tensor] : named_parameters(model)) {
      if (tensor.is_same(param)) {
        names.push_back(name);
      }
    }
  }
  return names;
}

TEST(MuonWithAdamWTest, DividesPlainAndShardedModels) {
  on_ranks(2, [](const Group&) {
    for (const bool is_sharded : {false, true}) {
      Zoo model;
      if (is_sharded) {
        fully_shard(model->up);
        fully_shard(model);
      }
      const auto optimizers = muon_with_adamw(model);
      EXPECT_THAT(
          names_in(model, *optimizers.muon),
          ElementsAre("up.weight", "down.weight"));
      EXPECT_THAT(
          names_in(model, *optimizers.adamw),
          ElementsAre(
              "head",
              "filter.weight",
              "filter.bias",
              "norm.weight",
              "norm.bias",
              "up.bias",
              "down.bias"));
      EXPECT_EQ(optimizers.refs().size(), 2);
      const auto chosen = muon_with_adamw(
          model, {}, {}, [](const std::string& name, at::IntArrayRef sizes) {
            return name == "head" && sizes == at::IntArrayRef({9, 4});
          });
      EXPECT_THAT(names_in(model, *chosen.muon), ElementsAre("head"));
    }
  });
}

TEST(MuonWithAdamWTest, AnOptimizerWithoutParametersIsNotMade) {
  Matrices matrices;
  auto optimizers = muon_with_adamw(matrices, 0.1);
  EXPECT_EQ(optimizers.adamw, nullptr);
  EXPECT_EQ(optimizers.refs().size(), 1);
  set_gradients(matrices, 0);
  optimizers.zero_grad();
  EXPECT_FALSE(matrices->parameters()[0].grad().defined());

  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
  EXPECT_EQ(muon_with_adamw(norm).muon, nullptr);
  EXPECT_THROW(muon_with_adamw(torch::nn::ReLU()), c10::ValueError);
}

TEST(MuonWithAdamWTest, AClosureRunsOnceAndGivesTheLoss) {
  Matrices model(/*has_vectors=*/true);
  auto optimizers = muon_with_adamw(model);
  int calls = 0;
  const auto before = model->pairs[0]->parameters()[2].detach().clone();
  const auto loss = optimizers.step([&] {
    ++calls;
    auto sum = torch::zeros({});
    for (const at::Tensor& param : model->parameters()) {
      sum = sum + param.square().sum();
    }
    sum.backward();
    return sum;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_GT(loss.item<double>(), 0);
  EXPECT_FALSE(at::equal(model->pairs[0]->parameters()[2], before));
}

} // namespace
} // namespace tessera::optim
