// Which activations recompute() keeps, and for how long.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recompute/support.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using torch::nn::Linear;

/// Counts the bytes that tensors of this thread have taken since it was
/// constructed.
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
  constexpr int64_t kOps = 7; // per call
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
  constexpr int64_t kOps = 8; // per call
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
  // its gradients: the incoming one, the current one and its successor.
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

} // namespace
} // namespace tessera
