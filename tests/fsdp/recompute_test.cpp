#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/recompute/recompute.h>

#include <ATen/autocast_mode.h>

#include <thread>

#include "engine/names.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/models.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::Block;
using tessera::testing::BlockImpl;
using tessera::testing::error_of;
using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using tessera::testing::Stack;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Module;
using torch::nn::Sequential;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kVocabulary = 11;
constexpr int64_t kWidth = 6;
constexpr int64_t kDepth = 4;

at::Tensor noise(at::IntArrayRef sizes, int seed = 0) {
  torch::manual_seed(100 + seed);
  return torch::randn(sizes);
}

at::Tensor leaf(at::IntArrayRef sizes, int seed = 0) {
  return noise(sizes, seed).requires_grad_();
}

/// Same bits, or as near as said for the largest; or both without a gradient.
void expect_same(
    const at::Tensor& a,
    const at::Tensor& b,
    double tolerance = 0) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) {
    return;
  }
  ASSERT_EQ(a.sizes(), b.sizes());
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  if (tolerance == 0 || b.numel() == 0) {
    EXPECT_TRUE(torch::equal(a, b)) << (a - b).abs().max().item<double>();
  } else {
    const double largest = b.abs().max().item<double>();
    EXPECT_LE((a - b).abs().max().item<double>(), tolerance * largest);
  }
}

/// Calls that pass through recompute(), or not, to compare the two.
struct Caller {
  bool recomputes;

  template <class F>
  at::Tensor operator()(F fn, const at::Tensor& input) const {
    return recomputes ? recompute(fn, input) : fn(input);
  }
};

/// What `body` gives, calling its functions as they are and under recompute().
void expect_no_difference(
    const std::function<Tensors(Caller)>& body,
    double tolerance = 0) {
  const Tensors plain = body(Caller{false});
  const Tensors recomputed = body(Caller{true});
  ASSERT_EQ(plain.size(), recomputed.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(plain[i], recomputed[i], tolerance);
  }
}

// One function, one process.

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
  EXPECT_EQ(calls.use_count(), 1); // until backward is through
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

// Random numbers and autocast.

TEST(RecomputeTest, DropoutDropsTheSameAgain) {
  for (const bool preserve : {true, false}) {
    const auto x = torch::ones({1000}).requires_grad_();
    torch::manual_seed(5);
    const auto y = recompute(
        [](const at::Tensor& in) {
          return torch::dropout(in, 0.5, true) * torch::rand({1000});
        },
        x,
        RecomputeOptions().preserve_rng_state(preserve));
    const auto before = torch::rand({2}); // the stream goes on
    y.sum().backward();
    // The function is linear: its gradient at 1 is its value.
    EXPECT_EQ(torch::equal(x.grad(), y), preserve);

    const auto after = torch::rand({2});
    torch::manual_seed(5);
    torch::dropout(torch::ones({1000}), 0.5, true);
    torch::rand({1000});
    EXPECT_TRUE(torch::equal(torch::rand({2}), before));
    EXPECT_EQ(torch::equal(torch::rand({2}), after), preserve);
  }
}

/// Autocast for the CPU, as one writes it in C++.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype, bool caches = true) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(caches);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(true);
  }
};

TEST(RecomputeTest, AutocastIsAsItWasInForward) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool caches : {true, false}) {
      for (const bool backward_inside : {true, false}) {
        SCOPED_TRACE(c10::toString(dtype));
        expect_no_difference([&](Caller call) {
          torch::manual_seed(6);
          Linear first(kWidth, kWidth);
          Linear second(kWidth, kWidth);
          std::vector<at::ScalarType> seen;
          at::Tensor y;
          {
            Autocast autocast(dtype, caches);
            const auto twice = [&](const at::Tensor& in) mutable {
              seen.push_back(first(in).scalar_type());
              EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), caches);
              return first(second(first(in).relu()).relu());
            };
            y = call(second, call(twice, noise({3, kWidth})));
            if (backward_inside) {
              y.to(at::kFloat).square().sum().backward();
            }
          }
          if (!backward_inside) {
            y.to(at::kFloat).square().sum().backward();
          }
          EXPECT_EQ(seen.size(), call.recomputes ? 2 : 1);
          EXPECT_EQ(seen.front(), dtype);
          EXPECT_EQ(seen.back(), dtype);
          EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
          EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
          return Tensors{first->weight.grad(), first->bias.grad()};
        });
      }
    }
  }
}

TEST(RecomputeTest, AForwardWithoutAutocastIsRerunWithout) {
  Linear linear(kWidth, kWidth);
  std::vector<at::ScalarType> seen;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        const auto out = linear(in);
        seen.push_back(out.scalar_type());
        return out;
      },
      noise({3, kWidth}));
  Autocast autocast(at::kBFloat16);
  y.sum().backward();
  EXPECT_THAT(seen, ElementsAre(at::kFloat, at::kFloat));
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU)); // of backward
}

TEST(RecomputeTest, ACastKeptByAutocastTiesNoTwoRuns) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(15);
    Linear shared(kWidth, kWidth);
    at::Tensor x = noise({3, kWidth});
    {
      // Without care the second finds the weight cast, and its rerun does not.
      Autocast autocast(at::kBFloat16);
      at::autocast::set_autocast_cache_enabled(call.recomputes);
      x = call(shared, shared(x));
    }
    x.to(at::kFloat).sum().backward();
    return Tensors{shared->weight.grad(), shared->bias.grad()};
  });
}

// Ways to run backward.

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

// What goes wrong.

TEST(RecomputeTest, RejectsInputsChangedSinceForward) {
  const auto x = leaf({3});
  auto h = x * 2;
  const auto y = recompute([](const at::Tensor& in) { return in.exp(); }, h);
  h.add_(1);
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      HasSubstr("modified by an inplace operation"));

  auto data = noise({3});
  const auto z =
      recompute([x](const at::Tensor& in) { return in.mul_(2) * x; }, data);
  EXPECT_THAT(
      error_of([&] { z.sum().backward(); }),
      HasSubstr("modified by an inplace operation"));
}

TEST(RecomputeTest, RejectsParametersChangedSinceForward) {
  Linear linear(kWidth, 2);
  const auto y = recompute(linear, noise({3, kWidth}));
  {
    torch::NoGradGuard no_grad;
    linear->bias.add_(1);
  }
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      AllOf(
          HasSubstr("[recompute] a parameter Float [2]"),
          HasSubstr("changed in place"),
          HasSubstr("at version 2, expected 1"))); // 1: initialized
}

TEST(RecomputeTest, RejectsASecondRunThatGivesSomethingElse) {
  const auto second_run_of = [](const std::function<Tensors(bool)>& outputs) {
    bool again = false;
    const auto first = recompute(
        [&](const Tensors&) { return outputs(std::exchange(again, true)); },
        {leaf({2})});
    return error_of([&] { first.front().sum().backward(); });
  };
  const auto x = leaf({2, 3});
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{x.exp(), again ? x.narrow(1, 0, 2) : x};
      }),
      HasSubstr(
          "[recompute] output 1 of the function was Float [2, 3] in forward and Float [2, 2] when backward ran it again"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{again ? x.to(at::kDouble) : x.exp()};
      }),
      HasSubstr("was Float [2, 3] in forward and Double [2, 3] when"));
  EXPECT_THAT(
      second_run_of(
          [&](bool again) { return Tensors{again ? x.detach() : x.exp()}; }),
      HasSubstr("and Float [2, 3] without gradient when"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{x.exp(), again ? at::Tensor() : x.exp()};
      }),
      HasSubstr(
          "output 1 of the function was Float [2, 3] in forward and undefined"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return again ? Tensors{x.exp()} : Tensors{x.exp(), x};
      }),
      HasSubstr("gave 2 outputs in forward and 1 when backward ran it again"));
}

TEST(RecomputeTest, RejectsASecondRunThatUsesOtherParameters) {
  const auto experts = Tensors{leaf({3}), leaf({3}, 1)};
  size_t turn = 0;
  const auto y = recompute(
      [&](const at::Tensor& in) { return in * experts[turn++ % 2]; },
      noise({3}));
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      AllOf(
          HasSubstr("[recompute] the function used parameters"),
          HasSubstr("1 times in forward and 1 times when"),
          HasSubstr("not the same")));
  EXPECT_FALSE(experts[0].grad().defined());
  EXPECT_FALSE(experts[1].grad().defined());
}

TEST(RecomputeTest, WhatTheSecondRunThrowsComesOutOfBackward) {
  const auto x = leaf({3});
  bool fails = false;
  const auto fn = [&](const at::Tensor& in) {
    const auto y = torch::dropout(in, 0.5, true).exp();
    if (fails) {
      throw std::out_of_range("on purpose");
    }
    return y;
  };
  const auto y = recompute(fn, x);
  torch::manual_seed(10);
  const auto expected = torch::rand({2});
  torch::manual_seed(10);
  fails = true;
  EXPECT_THROW(y.sum().backward(), std::out_of_range);
  expect_same(torch::rand({2}), expected); // the stream was put back
  EXPECT_FALSE(x.grad().defined());
  fails = false;
  recompute(fn, x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

// Memory.

/// Counts the bytes that tensors of this thread take since it was made.
class Ledger : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device)
      override {
    alive += bytes;
    peak = std::max(peak, alive);
  }
  bool memoryProfilingEnabled() const override {
    return true;
  }

  int64_t alive = 0;
  int64_t peak = 0;
};

class LedgerScope {
 public:
  Ledger& operator*() const {
    return *ledger_;
  }
  Ledger* operator->() const {
    return ledger_.get();
  }

 private:
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, ledger_};
};

TEST(RecomputeMemoryTest, KeepsTheInputsOfEachCallAlone) {
  constexpr int64_t kCalls = 5;
  constexpr int64_t kOps = 7; // a call
  constexpr int64_t kBytes = 4 * 4096; // of one activation
  const auto alive = [&](bool recomputes, const RecomputeOptions& options) {
    const auto x = leaf({4096});
    const auto fn = [](const at::Tensor& in) {
      auto y = in;
      for (int64_t i = 0; i < kOps; ++i) {
        y = y.tanh(); // saves its result
      }
      return y;
    };
    LedgerScope ledger;
    auto y = x;
    for (int64_t i = 0; i < kCalls; ++i) {
      y = recomputes ? recompute(fn, y, options) : fn(y);
    }
    return ledger->alive;
  };
  const auto plain_rng = RecomputeOptions().preserve_rng_state(false);
  EXPECT_EQ(alive(false, {}), kCalls * kOps * kBytes);
  EXPECT_EQ(alive(true, plain_rng), kCalls * kBytes);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_EQ(
      alive(true, {}),
      kCalls * (kBytes + static_cast<int64_t>(state.nbytes())));
}

TEST(RecomputeMemoryTest, ReleasesActivationsWhileBackwardRuns) {
  constexpr int64_t kCalls = 6;
  constexpr int64_t kOps = 8; // a call
  constexpr int64_t kBytes = 4 * 4096;
  const auto x = leaf({4096});
  LedgerScope ledger;
  auto y = x;
  for (int64_t i = 0; i < kCalls; ++i) {
    y = recompute(
        [](const at::Tensor& in) {
          auto out = in;
          for (int64_t op = 0; op < kOps; ++op) {
            out = out.tanh();
          }
          return out;
        },
        y,
        RecomputeOptions().preserve_rng_state(false));
  }
  auto loss = y.sum();
  y.reset();
  loss.backward();
  // Each call's input and the last output, the activations of one call, and
  // its gradients: the one that came in, the one under way and its successor.
  EXPECT_LE(ledger->peak, (kCalls + kOps + 3) * kBytes + 64);
  loss.reset();
  EXPECT_EQ(ledger->alive, kBytes); // the gradient of x
}

TEST(RecomputeMemoryTest, AWeightUsedOftenHasItsGradientsAddedUpOnTheWay) {
  constexpr int kUses = 20;
  constexpr int64_t kSide = 100;
  constexpr int64_t kBytes = 4 * kSide * kSide;
  expect_no_difference([](Caller call) {
    const auto weight = leaf({kSide, kSide});
    const auto x = noise({1, kSide}, 1);
    LedgerScope ledger;
    const auto y = call(
        [weight](const at::Tensor& in) {
          auto out = in;
          for (int i = 0; i < kUses; ++i) {
            out = torch::tanh(torch::linear(out, weight) / kSide);
          }
          return out;
        },
        x);
    y.sum().backward();
    // The sum, the next term, and a sum of the two; activations are small.
    EXPECT_LE(ledger->peak, 4 * kBytes);
    return Tensors{y, weight.grad()};
  });
}

TEST(RecomputeMemoryTest, ShardedLayersKeepTheSame) {
  constexpr int64_t kCalls = 3;
  constexpr int64_t kRows = 64;
  constexpr int64_t kBytes = 4 * kRows * kWidth; // of one activation
  on_ranks(2, [&](const Group&) {
    torch::manual_seed(0);
    std::vector<Linear> layers;
    for (int64_t i = 0; i < kCalls; ++i) {
      layers.emplace_back(kWidth, kWidth);
      fully_shard(*layers.back());
    }
    const auto alive_after_forward = [&](bool recomputes) {
      LedgerScope ledger;
      auto x = torch::ones({kRows, kWidth});
      for (auto& layer : layers) {
        auto fn = [layer](const at::Tensor& in) mutable {
          return layer(in).tanh().sin();
        };
        x = recomputes
            ? recompute(fn, x, RecomputeOptions().preserve_rng_state(false))
            : fn(x);
      }
      const int64_t alive = ledger->alive;
      x.sum().backward();
      return alive;
    };
    for (const bool recomputes : {false, true}) { // fills the buffer pool
      alive_after_forward(recomputes);
    }
    // Plain: what tanh gives is saved twice, as its result and sin's input.
    EXPECT_EQ(
        alive_after_forward(false) - alive_after_forward(true),
        kCalls * kBytes);
  });
}

// Whole models, plain and sharded.

enum class Mode { Plain, Blocks, Nested };

struct Case {
  int size;
  std::optional<ShardLayout> layout;
  std::optional<at::ScalarType> param_dtype = std::nullopt;
};

class RecomputeTrainingTest : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(RanksOptions{.size = GetParam().size, .backend = "shm"}, body);
  }
  Stack make() const {
    torch::manual_seed(3);
    Stack model(kVocabulary, kWidth, kDepth);
    if (GetParam().layout) {
      const auto options = FullyShardOptions()
                               .layout(*GetParam().layout)
                               .mp_policy(MixedPrecisionPolicy().param_dtype(
                                   GetParam().param_dtype));
      for (const auto& block : *model->blocks) {
        fully_shard(*block, options);
      }
      fully_shard(*model, options);
    }
    return model;
  }
};

at::Tensor tokens(int rank, int step) {
  torch::manual_seed(1000 + 10 * step + rank);
  return torch::randint(0, kVocabulary, {2, 5}, torch::kLong);
}

at::Tensor run_blocks(
    Stack& model,
    at::Tensor x,
    int64_t begin,
    int64_t end,
    bool recomputes) {
  const Caller call{recomputes};
  for (int64_t i = begin; i < end; ++i) {
    Block block(std::dynamic_pointer_cast<BlockImpl>(model->blocks->ptr(i)));
    x = call(
        [block](const at::Tensor& in) mutable {
          return torch::dropout(block(in), 0.2, true);
        },
        x);
  }
  return x;
}

at::Tensor loss_of(Stack& model, const at::Tensor& ids, Mode mode) {
  const Caller call{mode != Mode::Plain};
  auto x = call(model->embed, ids);
  if (mode == Mode::Nested) {
    for (int64_t i = 0; i < kDepth; i += 2) {
      x = recompute(
          [model, i](const at::Tensor& in) mutable {
            return run_blocks(model, in, i, i + 2, true);
          },
          x);
    }
  } else {
    x = run_blocks(model, x, 0, kDepth, mode == Mode::Blocks);
  }
  const auto head = [weight = model->head](const at::Tensor& in) {
    return torch::linear(in, weight);
  };
  return torch::cross_entropy_loss(
      call(head, x).view({-1, kVocabulary}), ids.roll(1, 1).reshape({-1}));
}

/// Losses, gradients and parameters of a few steps.
Tensors train(Stack& model, const Group& world, Mode mode) {
  const auto leaves = parameters(*model);
  torch::optim::AdamW optimizer(leaves, torch::optim::AdamWOptions(1e-2));
  Tensors result;
  for (int step = 0; step < 3; ++step) {
    const auto loss = loss_of(model, tokens(world.rank(), step), mode);
    loss.backward();
    result.push_back(loss.detach());
    for (const auto& parameter : leaves) {
      result.push_back(
          parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& parameter : leaves) {
    result.push_back(parameter.detach());
  }
  return result;
}

TEST_P(RecomputeTrainingTest, HasTheSameBitsAsWithout) {
  run([&](const Group& world) {
    auto plain = make();
    const Tensors expected = train(plain, world, Mode::Plain);
    for (const Mode mode : {Mode::Blocks, Mode::Nested}) {
      auto model = make();
      const Tensors found = train(model, world, mode);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        SCOPED_TRACE(i);
        expect_same(found[i], expected[i]);
      }
    }
  });
}

TEST_P(RecomputeTrainingTest, AccumulationHasTheSameBitsAsWithout) {
  run([&](const Group& world) {
    std::vector<Tensors> gradients;
    for (const Mode mode : {Mode::Plain, Mode::Blocks}) {
      auto model = make();
      set_requires_gradient_sync(*model, false);
      loss_of(model, tokens(world.rank(), 0), mode).backward();
      set_requires_gradient_sync(*model, true);
      loss_of(model, tokens(world.rank(), 1), mode).backward();
      auto& mine = gradients.emplace_back();
      for (const auto& parameter : parameters(*model)) {
        mine.push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      expect_same(gradients[0][i], gradients[1][i]);
    }
  });
}

TEST_P(
    RecomputeTrainingTest,
    AnExceptionInTheSecondRunIsFollowedByAHealthyStep) {
  run([&](const Group& world) {
    auto plain = make();
    const Tensors expected = train(plain, world, Mode::Plain);
    auto model = make();
    int calls = 0;
    const auto x =
        run_blocks(model, model->embed(tokens(world.rank(), 0)), 0, 2, true);
    const auto y = recompute(
        [&](const at::Tensor& in) {
          const auto out = run_blocks(model, in, 2, kDepth, true);
          if (++calls == 2) {
            throw std::out_of_range("on purpose");
          }
          return out;
        },
        x);
    EXPECT_THROW(y.sum().backward(), std::out_of_range);
    for (auto& parameter : parameters(*model)) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    const Tensors found = train(model, world, Mode::Blocks);
    for (size_t i = 0; i < found.size(); ++i) {
      expect_same(found[i], expected[i]);
    }
  });
}

TEST_P(RecomputeTrainingTest, GradOfAnActivationLeavesParametersAlone) {
  run([&](const Group& world) {
    Tensors found;
    for (const bool recomputes : {false, true}) {
      auto model = make();
      const auto x = noise({2, kWidth}, world.rank())
                         .to(GetParam().param_dtype.value_or(at::kFloat))
                         .requires_grad_();
      const auto y = run_blocks(model, x, 0, kDepth, recomputes);
      found.push_back(torch::autograd::grad({y.square().sum()}, {x})[0]);
      for (const auto& parameter : parameters(*model)) {
        EXPECT_FALSE(parameter.grad().defined());
      }
    }
    expect_same(found[0], found[1]);
  });
}

TEST_P(RecomputeTrainingTest, APenaltyOnGradientsOfInputsIsTheSame) {
  run([&](const Group& world) {
    std::vector<Tensors> found;
    for (const bool recomputes : {false, true}) {
      auto model = make();
      const auto x = noise({2, kWidth}, world.rank())
                         .to(GetParam().param_dtype.value_or(at::kFloat))
                         .requires_grad_();
      const auto y = run_blocks(model, x, 0, kDepth, recomputes).sum();
      const auto slope =
          torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
      (y + slope.square().sum()).backward();
      auto& gradients = found.emplace_back();
      for (const auto& parameter : parameters(*model)) {
        gradients.push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < found[0].size(); ++i) {
      expect_same(
          found[0][i], found[1][i], GetParam().param_dtype ? 0.1 : 1e-5);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    RecomputeTrainingTest,
    ::testing::Values(
        Case{1, std::nullopt},
        Case{1, ShardLayout::Flat},
        Case{1, ShardLayout::Dim0},
        Case{2, ShardLayout::Flat},
        Case{2, ShardLayout::Dim0},
        Case{2, ShardLayout::Flat, at::kBFloat16}),
    [](const auto& test) {
      const auto& layout = test.param.layout;
      return !layout ? std::string("Plain")
                     : (*layout == ShardLayout::Flat ? "Flat" : "Dim0") +
              std::to_string(test.param.size) +
              (test.param.param_dtype ? "Mixed" : "");
    });

TEST(RecomputeScheduleTest, RejectsShardedParametersChangedSinceForward) {
  on_ranks(2, [](const Group&) {
    torch::nn::Linear linear(4, 4);
    fully_shard(*linear);
    const auto x = torch::ones({1, 4});
    const at::Tensor loss = recompute(linear, x).sum();
    {
      torch::NoGradGuard no_grad;
      for (const auto& leaf : parameters(*linear)) {
        leaf.add_(1);
      }
    }
    linear->forward(x); // gathered anew: nothing looks stale
    try {
      loss.backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("the shard was changed"));
    }
  });
}

TEST(RecomputeScheduleTest, IssuesExactlyTheCollectivesOfAPlainStep) {
  on_ranks(2, [](const Group& world) {
    for (const Mode mode : {Mode::Plain, Mode::Blocks, Mode::Nested}) {
      torch::manual_seed(0);
      Stack model(kVocabulary, kWidth, kDepth);
      // Units of two blocks: each gets gradients from two recomputations.
      for (int64_t i = 0; i < kDepth; i += 2) {
        Sequential pair;
        for (int64_t j = i; j < i + 2; ++j) {
          pair->push_back(Block(
              std::dynamic_pointer_cast<BlockImpl>(model->blocks->ptr(j))));
        }
        fully_shard(*pair);
      }
      fully_shard(*model);
      auto& schedule = *engine::Schedule::of(world);
      for (int step = 0; step < 3; ++step) {
        schedule.probe_for_tests().counts = {};
        loss_of(model, tokens(world.rank(), step), mode).backward();
        // Forward: the root and each unit; backward: each unit but the last,
        // which is still there, and all of them once their gradients are.
        EXPECT_EQ(
            schedule.probe_for_tests().counts.gathers, 1 + 2 * (kDepth / 2));
        EXPECT_EQ(schedule.probe_for_tests().counts.reductions, 1 + kDepth / 2);
      }
    }
  });
}

// Modules under recompute.

/// Counts its calls, in a member that all copies share.
struct CountedImpl : Module {
  explicit CountedImpl(int64_t width)
      : linear(register_module("linear", Linear(width, width))) {}

  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return torch::tanh(linear(x));
  }

  Linear linear;
  int calls = 0;
};
TORCH_MODULE(Counted);

std::vector<std::string> names_of(const Module& module) {
  return module.named_parameters().keys();
}

std::vector<std::string> our_names_of(Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : named_parameters(module)) {
    names.push_back(name);
  }
  return names;
}

TEST(RecomputeModulesTest, ReplacesElementsOfASequential) {
  Counted first(kWidth);
  Sequential model({{"first", first}, {"act", torch::nn::ReLU()}});
  model->push_back("last", Counted(kWidth));
  const auto before = names_of(*model);
  first->eval();
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*model), 2);
  EXPECT_THAT(
      names_of(*model),
      ElementsAre(
          "first._checkpoint_wrapped_module.linear.weight",
          "first._checkpoint_wrapped_module.linear.bias",
          "last._checkpoint_wrapped_module.linear.weight",
          "last._checkpoint_wrapped_module.linear.bias"));
  EXPECT_EQ(our_names_of(*model), before);
  EXPECT_FALSE(model[0]->is_training());
  EXPECT_FALSE(first->is_training());
  EXPECT_TRUE(model[2]->is_training());

  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(first->calls, 2);
  EXPECT_TRUE(first->linear->weight.grad().defined());
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*model), 0); // done already
}

TEST(RecomputeModulesTest, ChoosesByPredicateHolderOrImpl) {
  const auto make = [] {
    return Sequential(
        Counted(kWidth), torch::nn::ReLU(), Linear(kWidth, kWidth));
  };
  auto by_class = make();
  EXPECT_EQ(
      (apply_activation_checkpointing<CountedImpl, torch::nn::ReLU>(*by_class)),
      2);
  auto by_rule = make(); // Counted has none of its own
  EXPECT_EQ(
      apply_activation_checkpointing(
          *by_rule,
          [](const Module& module) {
            return module.parameters(/*recurse=*/false).empty();
          }),
      2);
  auto none = make();
  EXPECT_EQ(apply_activation_checkpointing<Block>(*none), 0);
  auto all = Sequential(torch::nn::ReLU(), torch::nn::Tanh());
  const auto yes = [](const Module&) { return true; };
  EXPECT_EQ(apply_activation_checkpointing(*all, yes), 2);
  EXPECT_EQ(apply_activation_checkpointing(*all, yes), 0); // nor the wrappers
}

TEST(RecomputeModulesTest, TrainsAsWithout) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(11);
    Sequential model;
    for (int i = 0; i < 3; ++i) {
      model->push_back(Block(kWidth));
      model->push_back(torch::nn::Dropout(0.3));
    }
    if (call.recomputes) {
      EXPECT_EQ(
          (apply_activation_checkpointing<Block, torch::nn::Dropout>(*model)),
          6);
    }
    const auto x = leaf({2, kWidth});
    model->forward(x).square().sum().backward();
    Tensors result{x.grad()};
    for (const auto& parameter : model->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeModulesTest, OptionsReachTheWrappers) {
  const auto kept = [](bool preserve) {
    Sequential model(torch::nn::Dropout(0.5));
    apply_activation_checkpointing<torch::nn::Dropout>(
        *model, RecomputeOptions().preserve_rng_state(preserve));
    const auto x = torch::ones({1000}).requires_grad_();
    const auto y = model->forward(x);
    y.sum().backward();
    return torch::equal(x.grad(), y);
  };
  EXPECT_TRUE(kept(true));
  EXPECT_FALSE(kept(false));
}

struct WeightedSumImpl : Module {
  at::Tensor weight = register_parameter("weight", leaf({kWidth}));
  at::Tensor forward(const at::Tensor& a, at::Tensor b, double scale) {
    return (a * weight + b).tanh() * scale;
  }
};
TORCH_MODULE(WeightedSum);

TEST(RecomputeModulesTest, PassesOnSeveralArguments) {
  expect_no_difference([](Caller call) {
    Sequential model{WeightedSum(), torch::nn::ReLU()};
    if (call.recomputes) {
      EXPECT_EQ(apply_activation_checkpointing<WeightedSum>(*model), 1);
    }
    const auto a = leaf({2, kWidth});
    const auto b = leaf({2, kWidth}, 1);
    const auto y = model->forward(a, b, 0.5);
    y.sum().backward();
    return Tensors{y, a.grad(), b.grad(), model->parameters().front().grad()};
  });
}

TEST(RecomputeModulesTest, ClonesAreUnderRecomputeToo) {
  Sequential model{torch::nn::Dropout(0.5), Linear(kWidth, kWidth)};
  apply_activation_checkpointing<Linear>(*model);
  const auto copy =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  EXPECT_EQ(names_of(*copy), names_of(*model));
  EXPECT_FALSE(copy->parameters()[0].is_same(model->parameters()[0]));
  copy->forward(noise({2, kWidth})).sum().backward();
  EXPECT_TRUE(copy->parameters()[0].grad().defined());
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

TEST(RecomputeModulesTest, ASharedElementHasOneWrapper) {
  Counted shared(kWidth);
  Sequential model{shared, torch::nn::ReLU(), shared};
  Module owner;
  owner.register_module("again", Sequential(shared));
  owner.register_module("model", model);
  EXPECT_EQ(apply_activation_checkpointing<Counted>(owner), 1);
  EXPECT_EQ(model[0], model[2]);
  EXPECT_EQ(owner.children()[0]->children()[0], model[0]);
  EXPECT_EQ(model->children()[2], model[2]);
  EXPECT_NE(model[0], shared.ptr());
  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(shared->calls, 4);
}

struct OuterImpl : Module {
  Sequential inner =
      register_module("inner", Sequential(Counted(kWidth), Counted(kWidth)));
  at::Tensor forward(const at::Tensor& x) {
    return inner->forward(x);
  }
};
TORCH_MODULE(Outer);

TEST(RecomputeModulesTest, WrapsInsideOfWhatItWraps) {
  Outer outer;
  Sequential model(outer);
  EXPECT_EQ((apply_activation_checkpointing<Outer, Counted>(*model)), 3);
  EXPECT_EQ(
      names_of(*model).front(),
      "0._checkpoint_wrapped_module.inner.0._checkpoint_wrapped_module.linear.weight");
  EXPECT_EQ(our_names_of(*model).front(), "0.inner.0.linear.weight");
  const Counted counted(std::dynamic_pointer_cast<CountedImpl>(
      outer->inner[0]->children().front()));
  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(counted->calls, 3); // in forward, and for each of the two
}

TEST(RecomputeModulesTest, ASequentialThatIsAMemberIsRecomputedAsAWhole) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(12);
    Outer outer;
    const auto before = names_of(*outer);
    const Counted counted(
        std::dynamic_pointer_cast<CountedImpl>(outer->inner->ptr(1)));
    outer->inner->eval();
    if (call.recomputes) {
      EXPECT_EQ(apply_activation_checkpointing<Sequential>(*outer), 1);
      EXPECT_EQ(apply_activation_checkpointing<Sequential>(*outer), 0);
      EXPECT_THAT(
          names_of(*outer).front(), HasSubstr("_checkpoint_wrapped_module"));
      EXPECT_EQ(our_names_of(*outer), before);
      EXPECT_FALSE(outer->inner->ptr(0)->is_training());
    }
    const auto x = leaf({2, kWidth});
    outer->forward(x).square().sum().backward();
    EXPECT_EQ(counted->calls, call.recomputes ? 2 : 1);
    Tensors result{x.grad()};
    for (const auto& parameter : outer->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeModulesTest, WrapsInsideOfAWholeSequential) {
  Outer outer;
  const Counted first(
      std::dynamic_pointer_cast<CountedImpl>(outer->inner->ptr(0)));
  EXPECT_EQ((apply_activation_checkpointing<Sequential, Counted>(*outer)), 3);
  EXPECT_EQ(our_names_of(*outer).front(), "inner.0.linear.weight");
  outer->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(first->calls, 3); // in forward, and for each of the two

  Outer later;
  EXPECT_EQ(apply_activation_checkpointing<Sequential>(*later), 1);
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*later), 2);
  EXPECT_EQ(our_names_of(*later), our_names_of(*outer));
}

TEST(RecomputeModulesTest, AWholeSequentialTakesSeveralArguments) {
  struct Owner : Module {
    Sequential inner =
        register_module("inner", Sequential(WeightedSum(), torch::nn::ReLU()));
  };
  Owner owner;
  const auto a = leaf({2, kWidth});
  const auto b = leaf({2, kWidth}, 1);
  const auto expected = owner.inner->forward(a, b, 0.5);
  EXPECT_EQ(apply_activation_checkpointing<Sequential>(owner), 1);
  const auto actual = owner.inner->forward(a, b, 0.5);
  EXPECT_TRUE(torch::equal(actual, expected));
  actual.sum().backward();
  EXPECT_TRUE(b.grad().defined());
}

TEST(RecomputeModulesTest, AWholeSequentialRefusesWhatItCannotKeep) {
  Outer outer;
  apply_activation_checkpointing<Sequential>(*outer);
  EXPECT_THAT(
      error_of([&] { outer->inner->clone(); }),
      HasSubstr("Clone the model first"));

  Outer with_more;
  with_more->inner->register_parameter("scale", leaf({1}));
  const auto before = names_of(*with_more);
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Sequential>(*with_more); }),
      AllOf(
          HasSubstr("submodule \"inner\""), HasSubstr("beside its elements")));
  EXPECT_EQ(names_of(*with_more), before);
}

TEST(RecomputeModulesTest, RejectsWhatIsNotInASequential) {
  Stack model(kVocabulary, kWidth, 2);
  auto front = Sequential(Block(kWidth));
  model->register_module("front", front); // could be replaced
  const auto before = names_of(*model);
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Block>(*model); }),
      AllOf(
          HasSubstr("[apply_activation_checkpointing] submodule \"blocks.0\""),
          HasSubstr("BlockImpl) is not an element of a torch::nn::Sequential"),
          HasSubstr("Call tessera::recompute in the forward of")));
  EXPECT_EQ(names_of(*model), before);
  EXPECT_EQ(front[0]->as<Block>(), front->children()[0]->as<Block>());
  EXPECT_NE(front[0]->as<Block>(), nullptr);

  front->register_module("beside", Block(kWidth)); // a child, but no element
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Block>(*front); }),
      HasSubstr("submodule \"beside\""));
  EXPECT_NE(front[0]->as<Block>(), nullptr);
}

TEST(RecomputeModulesTest, RejectsAModuleThatReturnsNoTensor) {
  Sequential model(torch::nn::LSTM(kWidth, kWidth));
  EXPECT_EQ(apply_activation_checkpointing<torch::nn::LSTM>(*model), 1);
  EXPECT_THAT(
      error_of([&] {
        model->forward(noise({3, 1, kWidth}));
      }),
      AllOf(
          HasSubstr("LSTMImpl returns std::tuple"),
          HasSubstr("only modules that return a tensor")));
}

TEST(RecomputeNamesTest, SegmentsOfWrappersAreDropped) {
  using engine::clean_name;
  EXPECT_EQ(clean_name(""), "");
  EXPECT_EQ(clean_name("weight"), "weight");
  EXPECT_EQ(clean_name("_checkpoint_wrapped_module"), "");
  EXPECT_EQ(clean_name("_checkpoint_wrapped_module.weight"), "weight");
  EXPECT_EQ(clean_name("a._fsdp_wrapped_module"), "a");
  EXPECT_EQ(
      clean_name(
          "_fsdp_wrapped_module.a._fsdp_wrapped_module._checkpoint_wrapped_module.0.b"),
      "a.0.b");
  // Whole segments only.
  EXPECT_EQ(
      clean_name("my_checkpoint_wrapped_module.x"),
      "my_checkpoint_wrapped_module.x");
  EXPECT_EQ(
      clean_name("_checkpoint_wrapped_module2.x"),
      "_checkpoint_wrapped_module2.x");
}

class RecomputeShardedModulesTest
    : public ::testing::TestWithParam<std::tuple<ShardLayout, bool>> {};

TEST_P(RecomputeShardedModulesTest, TrainsAsWithoutUnderTheSameNames) {
  on_ranks(2, [](const Group& world) {
    const auto [layout, wraps_first] = GetParam();
    const auto options = FullyShardOptions().layout(layout);
    const auto train = [&, wraps_first = wraps_first](bool recomputes) {
      torch::manual_seed(12);
      auto root = std::make_shared<Module>();
      Sequential model{Block(kWidth), Block(kWidth), Linear(kWidth, 2)};
      root->register_module("layers", model);
      if (recomputes && wraps_first) {
        EXPECT_EQ(apply_activation_checkpointing<Block>(*root), 2);
      }
      for (size_t i = 0; i < 2; ++i) {
        fully_shard(*model[i], options);
      }
      if (recomputes && !wraps_first) {
        EXPECT_EQ(apply_activation_checkpointing<Block>(*root), 2);
      }
      fully_shard(*root, options);
      for (const auto& parameter : model[0]->parameters()) {
        EXPECT_EQ(engine::unit_of(parameter)->name(), "layers.0");
      }
      torch::optim::AdamW optimizer(
          parameters(*root), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        model->forward(noise({3, kWidth}, 10 * step + world.rank()))
            .square()
            .mean()
            .backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return named_parameters(*root);
    };
    const auto expected = train(false);
    const auto found = train(true);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].first, expected[i].first);
      expect_same(found[i].second, expected[i].second);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    RecomputeShardedModulesTest,
    ::testing::Combine(
        ::testing::Values(ShardLayout::Flat, ShardLayout::Dim0),
        ::testing::Bool()),
    [](const auto& test) {
      return std::string(
                 std::get<0>(test.param) == ShardLayout::Flat ? "Flat"
                                                              : "Dim0") +
          (std::get<1>(test.param) ? "Wrapped" : "ShardedFirst");
    });

} // namespace
} // namespace tessera
