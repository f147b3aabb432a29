// Ways to run backward through recompute().
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "fsdp/models.h"
#include "recompute/support.h"
#include "support/errors.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Sequential;

TEST(RecomputeTest, NestsToAnyDepth) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(7);
    Sequential layers;
    for (int i = 0; i < 3; ++i) {
      layers->push_back(Block(kWidth));
    }
    const auto x = leaf({2, kWidth});
    const auto dropped = [](const at::Tensor& in) {
      return torch::dropout(in, 0.3, true);
    };
    const auto third = [&](const at::Tensor& in) {
      return layers->at<BlockImpl>(2).forward(dropped(in)).tanh();
    };
    const auto second = [&](const at::Tensor& in) {
      return call(third, layers->at<BlockImpl>(1).forward(dropped(in))).sin();
    };
    const auto first = [&](const at::Tensor& in) {
      return call(second, layers->at<BlockImpl>(0).forward(in)) * 2;
    };
    call(first, x).square().sum().backward();
    Tensors result{x.grad()};
    for (const auto& parameter : layers->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeTest, BackwardMayRunTwiceIfTheGraphIsKept) {
  Linear linear(kWidth, kWidth);
  const auto x = leaf({2, kWidth});
  const auto y = recompute(
      [linear](const at::Tensor& in) mutable {
        return torch::dropout(linear(in), 0.5, true).square();
      },
      x);
  y.sum().backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  const auto once_weight = linear->weight.grad().clone();
  y.sum().backward();
  expect_same(x.grad(), once * 2);
  expect_same(linear->weight.grad(), once_weight * 2);
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      HasSubstr("backward through the graph a second time"));
}

TEST(RecomputeTest, GradOfATensorLeavesTheOthersAlone) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(8);
    Block block(kWidth);
    const auto x = leaf({2, kWidth});
    const auto h = x.exp();
    const auto loss = call(block, h).square().sum();
    Tensors result;
    for (const at::Tensor& wanted : {x, h, block->up->weight}) {
      result.push_back(
          torch::autograd::grad({loss}, {wanted}, {}, /*retain_graph=*/true)
              .front());
    }
    EXPECT_FALSE(x.grad().defined());
    for (const auto& parameter : block->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    return result;
  });
}

TEST(RecomputeTest, GradientsOfGradientsAreTheSame) {
  const auto body = [](Caller call) {
    torch::manual_seed(9);
    Block first(kWidth);
    Block second(kWidth);
    first->to(at::kDouble);
    second->to(at::kDouble);
    const auto x = noise({2, kWidth}).to(at::kDouble).requires_grad_();
    const auto y = call(second, call(first, x)).tanh().sum();
    const auto slope =
        torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    (y + slope.square().sum()).backward();
    Tensors result{x.grad()};
    for (const auto& block : {first, second}) {
      for (const auto& parameter : block->parameters()) {
        result.push_back(parameter.grad());
      }
    }
    return result;
  };
  // The graph of the first gradients is made in another order, and so added up.
  expect_no_difference(body, 1e-12);
}

TEST(RecomputeTest, BackwardMayRunInAnotherThread) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(14);
    Block block(kWidth);
    const auto x = leaf({2, kWidth});
    // In its graph and captured: nodes of this thread, numbered by it.
    const auto h = x.exp().sin();
    const auto captured = x.cos() * 2;
    const auto inner = [block, captured](const at::Tensor& in) mutable {
      return block(in) * captured;
    };
    const auto y =
        call([=](const at::Tensor& in) { return call(inner, in.tanh()); }, h);
    std::thread([&] { y.square().sum().backward(); }).join();
    Tensors result{x.grad()};
    for (const auto& parameter : block->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeTest, ALongChainIsFreedWithoutExhaustingTheStack) {
  auto x = leaf({1});
  for (int i = 0; i < 50000; ++i) {
    x = recompute([](const at::Tensor& in) { return in + 1; }, x);
  }
  x.reset();
}

TEST(RecomputeTest, HooksRunOnce) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(13);
    Linear linear(kWidth, kWidth);
    const auto x = leaf({2, kWidth});
    const auto h = x * 1;
    int of_weight = 0;
    int of_input = 0;
    linear->weight.register_hook([&](const at::Tensor&) { ++of_weight; });
    h.register_hook([&](const at::Tensor& gradient) {
      ++of_input;
      return gradient * 2;
    });
    call(linear, h).sum().backward();
    EXPECT_EQ(of_weight, 1);
    EXPECT_EQ(of_input, 1);
    return Tensors{x.grad(), linear->weight.grad()};
  });
}

TEST(RecomputeTest, OutputsMayBeChangedInPlace) {
  expect_no_difference([](Caller call) {
    const auto x = leaf({4});
    auto y = call([](const at::Tensor& in) { return in * 3; }, x * 1);
    y.mul_(2).relu_();
    y.sum().backward();
    return Tensors{y, x.grad()};
  });
}

} // namespace
} // namespace tessera
