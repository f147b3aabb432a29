// recompute() of one function in one process: what it may take and return.
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/models.h"
#include "recompute/support.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using torch::nn::Linear;

TEST(RecomputeTest, RunsTheFunctionOnceMoreInBackward) {
  auto calls = std::make_shared<int>(0);
  const auto x = leaf({3});
  const auto y = recompute(
      [calls](const at::Tensor& in) {
        ++*calls;
        return in.exp().tanh();
      },
      x);
  EXPECT_EQ(*calls, 1);
  EXPECT_EQ(calls.use_count(), 2); // the graph has the function
  y.sum().backward();
  EXPECT_EQ(*calls, 2);
  EXPECT_EQ(calls.use_count(), 1); // until backward is done
}

TEST(RecomputeTest, GradientsHaveTheSameBits) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(1);
    Block first(kWidth);
    Block second(kWidth);
    const auto x = leaf({2, 3, kWidth});
    // Residuals around, and an input used outside as well.
    const auto y = call(first, x * 2);
    const auto z = y + call(second, y);
    (z.square().mean() + y.sum()).backward();
    Tensors result{z, x.grad()};
    for (const auto& block : {first, second}) {
      for (const auto& parameter : block->parameters()) {
        result.push_back(parameter.grad());
      }
    }
    return result;
  });
}

TEST(RecomputeTest, ASharedParameterAddsUpInTheSameOrder) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(2);
    Linear shared(kWidth, kWidth);
    for (auto& parameter : shared->parameters()) { // as after a micro-batch
      parameter.mutable_grad() = torch::randn_like(parameter) * 1e-3;
    }
    auto x = noise({5, kWidth});
    for (int i = 0; i < 4; ++i) {
      x = call(
          [shared](const at::Tensor& in) mutable {
            return torch::tanh(shared(in));
          },
          x);
    }
    x.square().sum().backward();
    return Tensors{shared->weight.grad(), shared->bias.grad()};
  });
}

TEST(RecomputeTest, CapturedParametersGetGradientsWithoutAnInputThatDoes) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(3);
    torch::nn::Embedding embedding(kVocabulary, kWidth);
    Linear linear(kWidth, 2);
    const auto ids = torch::tensor({1, 4, 4, 7}, at::kLong);
    const auto x = call(embedding, ids); // integers
    const auto y = call(linear, noise({4, kWidth})); // data
    (x.square().sum() + y.square().sum()).backward();
    EXPECT_TRUE(embedding->weight.grad().defined());
    return Tensors{
        embedding->weight.grad(), linear->weight.grad(), linear->bias.grad()};
  });
}

TEST(RecomputeTest, CapturedActivationsPassGradientsOnToTheirOwnGraph) {
  expect_no_difference([](Caller call) {
    const auto w = leaf({kWidth});
    const auto shared = w.exp().sin(); // its graph serves both calls
    auto x = leaf({3, kWidth}, 1);
    auto y = x;
    for (int i = 0; i < 2; ++i) {
      y = call(
          [shared](const at::Tensor& in) { return (in * shared).tanh(); }, y);
    }
    y.square().sum().backward();
    return Tensors{w.grad(), x.grad()};
  });
}

TEST(RecomputeTest, TheFunctionMayWriteToViewsOfItsOwn) {
  expect_no_difference([](Caller call) {
    const auto x = leaf({4, kWidth});
    const auto w = leaf({kWidth}, 1);
    const auto v = leaf({kWidth}, 2);
    const auto fn = [w, v](const at::Tensor& in) {
      auto out = in * 3;
      out[0].mul_(w);
      out.narrow(0, 2, 2).copy_(in.narrow(0, 0, 2) * v);
      return out.tanh();
    };
    const auto loss = call(fn, x * 1).square().sum();
    const auto alone = torch::autograd::grad({loss}, {v}, {}, true).front();
    loss.backward();
    return Tensors{alone, x.grad(), w.grad(), v.grad()};
  });
}

TEST(RecomputeTest, TakesIntegersUndefinedAndFrozenInputs) {
  const auto run = [](bool recomputes) {
    const auto weight = leaf({kVocabulary, kWidth});
    const auto scale = noise({kWidth}, 1);
    const auto fn = [](const Tensors& in) {
      EXPECT_FALSE(in[2].defined());
      EXPECT_FALSE(in[3].requires_grad());
      return Tensors{torch::embedding(in[1], in[0]) * in[3]};
    };
    const Tensors inputs{
        torch::tensor({2, 0, 2}, at::kLong), weight, at::Tensor(), scale};
    const auto y = (recomputes ? recompute(fn, inputs) : fn(inputs)).front();
    y.square().sum().backward();
    EXPECT_FALSE(scale.grad().defined());
    return weight.grad();
  };
  expect_same(run(true), run(false));
}

TEST(RecomputeTest, TakesOutputsThatAreUnusedOrHaveNoGradient) {
  const auto run = [](bool recomputes) {
    const auto x = leaf({4, kWidth});
    const auto w = leaf({kWidth}, 1);
    const auto fn = [w](const Tensors& in) {
      return Tensors{
          in[0].exp(), in[0].argmax(1), in[0] * w, at::Tensor(), in[0]};
    };
    const Tensors out = recomputes ? recompute(fn, {x}) : fn({x});
    EXPECT_FALSE(out[1].requires_grad());
    EXPECT_FALSE(out[3].defined());
    EXPECT_TRUE(out[2].requires_grad());
    // out[2] is not part of the loss, out[4] is an input handed through.
    (out[0].sum() + (out[4] * out[1].unsqueeze(1)).sum()).backward();
    EXPECT_FALSE(w.grad().defined());
    return Tensors{x.grad(), out[0], out[1]};
  };
  const Tensors ours = run(true);
  const Tensors theirs = run(false);
  for (size_t i = 0; i < ours.size(); ++i) {
    expect_same(ours[i], theirs[i]);
  }
}

TEST(RecomputeTest, AFunctionWithoutGradientsIsJustCalled) {
  const auto y =
      recompute([](const at::Tensor& in) { return in.exp(); }, noise({3}));
  EXPECT_FALSE(y.requires_grad());
}

TEST(RecomputeTest, WithoutGradModeTheFunctionIsJustCalled) {
  int calls = 0;
  const auto x = leaf({3});
  const auto fn = [&](const at::Tensor& in) {
    ++calls;
    EXPECT_FALSE(at::GradMode::is_enabled());
    return in.exp();
  };
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(recompute(fn, x).requires_grad());
  }
  {
    c10::InferenceMode inference;
    EXPECT_TRUE(recompute(fn, x).is_inference());
  }
  EXPECT_EQ(calls, 2);
}

} // namespace
} // namespace tessera
