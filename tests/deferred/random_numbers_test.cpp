// The random numbers of a deferred construction are those of a plain one.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deferred/support.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture

TEST_F(DeferredInitTest, SeedsInsideConstructorsAreSeen) {
  expect_as_plain(with([](Lambda& self) {
    self.child("first", torch::nn::Linear(5, 6));
    torch::manual_seed(3);
    self.child("second", torch::nn::Linear(5, 6));
    torch::manual_seed(3); // the same again
    self.child("third", torch::nn::Linear(5, 6));
    torch::manual_seed(kSeed);
    self.child("fourth", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, StatesRestoredInsideConstructorsAreSeen) {
  expect_as_plain(with([](Lambda& self) {
    auto generator = at::detail::getDefaultCPUGenerator();
    self.child("first", torch::nn::Linear(5, 6));
    const auto state = generator.get_state();
    torch::manual_seed(3);
    self.child("second", torch::nn::Linear(5, 6));
    generator.set_state(state);
    self.child("third", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, OddNormalDrawsKeepTheirPairs) {
  // Few normal numbers are drawn in pairs, and the second one is kept.
  expect_as_plain(with([](Lambda& self) {
    self.buffer("one", torch::randn({1}));
    self.buffer("three", torch::randn({3}, torch::kDouble));
    self.buffer("many", torch::randn({17}));
    self.buffer("two", torch::randn({2}));
    self.buffer("strided", torch::empty({20, 2}).select(1, 0).normal_());
  }));
}

TEST_F(DeferredInitTest, GeneratorsOfTheCallersAreUsed) {
  expect_as_plain(with([](Lambda& self) {
    auto own = at::make_generator<at::CPUGeneratorImpl>(5);
    self.buffer("a", torch::empty({20}).normal_(0, 1, own));
    self.buffer("b", torch::rand({20}));
    self.buffer("c", torch::rand({20}, own));
    const auto copy = own.clone();
    self.buffer("d", torch::rand({20}, own));
    self.buffer("e", torch::rand({20}, copy));
    own.set_current_seed(5);
    self.buffer("f", torch::rand({20}, own));
  }));
}

TEST_F(DeferredInitTest, RealDrawsInBetweenMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child("first", torch::nn::Linear(5, 6));
    const auto drawn = torch::tensor({0., 0.}).normal_();
    self.buffer("drawn", drawn);
    self.child("second", torch::nn::Linear(5, 6));
    self.buffer("shuffled", torch::rand_like(drawn));
    self.child("third", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, ResettingParametersMatchesPlainConstruction) {
  expect_as_plain([] {
    torch::nn::Sequential model(
        torch::nn::Linear(5, 6),
        torch::nn::Linear(6, 7),
        torch::nn::Linear(7, 8));
    model->apply([](Module& module) {
      if (auto* linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::normal_(linear->weight, 0, 0.02);
        torch::nn::init::zeros_(linear->bias);
      }
    });
    return model.ptr();
  });
}

TEST_F(DeferredInitTest, ReplayRestoresTheGenerator) {
  const auto module = make_deferred([] {
    return torch::nn::Sequential(
               torch::nn::Linear(4, 4), torch::nn::Linear(4, 4))
        .ptr();
  });
  torch::manual_seed(21);
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  replay(module->parameters()[2]);
  EXPECT_TRUE(
      at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  materialize(*module);
  EXPECT_TRUE(
      at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), 21U);
}

TEST_F(DeferredInitTest, DrawsAfterwardsAreReproducible) {
  const auto draw = [] {
    make_deferred([] { return torch::nn::Linear(4, 4).ptr(); });
    EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), kSeed);
    return torch::rand({3});
  };
  EXPECT_TRUE(at::equal(draw(), draw()));
}

TEST_F(DeferredInitTest, GuardsInARowMatchPlainConstruction) {
  for (const bool materialize_first : {false, true}) {
    torch::manual_seed(kSeed);
    torch::nn::Linear plain_actor(5, 6);
    torch::nn::Linear plain_critic(5, 6);
    torch::manual_seed(kSeed);
    torch::nn::Linear actor{nullptr};
    torch::nn::Linear critic{nullptr};
    {
      const DeferredInit deferred;
      actor = torch::nn::Linear(5, 6);
    }
    if (materialize_first) {
      materialize(*actor);
      EXPECT_EQ(num_live_tapes(), 0);
    }
    {
      const DeferredInit deferred;
      critic = torch::nn::Linear(5, 6);
    }
    materialize(*critic);
    materialize(*actor);
    expect_same("critic", critic->weight, plain_critic->weight);
    expect_same("actor", actor->bias, plain_actor->bias);
  }
}

} // namespace
} // namespace tessera
