// What the loss holds at most: logits of a chunk, not of all tokens.
#include <tessera/nn/linear_cross_entropy.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include "support/memory_meter.h"

namespace tessera {
namespace {

constexpr int64_t kMeasuredTokens = 512;
constexpr int64_t kMeasuredWidth = 32;
constexpr int64_t kMeasuredClasses = 4096;
constexpr int64_t kChunk = 64;
constexpr double kFloat = 4; // bytes
constexpr double kChunkBytes = kChunk * kMeasuredClasses * kFloat;
constexpr double kLogitsBytes = kMeasuredTokens * kMeasuredClasses * kFloat;
constexpr double kGradientBytes =
    (kMeasuredTokens * kMeasuredWidth + kMeasuredClasses * kMeasuredWidth) *
    kFloat;
constexpr double kSlack = 1.1;

struct Layer {
  explicit Layer(at::ScalarType dtype = torch::kFloat)
      : hidden(torch::randn({kMeasuredTokens, kMeasuredWidth})
                   .to(dtype)
                   .requires_grad_()),
        weight(torch::randn({kMeasuredClasses, kMeasuredWidth})
                   .to(dtype)
                   .requires_grad_()),
        targets(torch::randint(
            0,
            kMeasuredClasses,
            {kMeasuredTokens},
            torch::kLong)) {}

  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor targets;
};

LinearCrossEntropyOptions in_chunks() {
  return LinearCrossEntropyOptions().batch_chunk_size(kChunk);
}

/// The most that `body` held, in bytes, above what was there before.
template <class Body>
double peak_of(Body body) {
  const testing::MemoryMeter meter;
  body();
  return static_cast<double>(meter.peak_bytes());
}

TEST(LinearCrossEntropyMemoryTest, HoldsTheLogitsOfAChunkTwice) {
  const Layer layer;
  const double ours = peak_of([&] {
    linear_cross_entropy(layer.hidden, layer.weight, layer.targets, in_chunks())
        .backward();
  });
  EXPECT_LE(ours, kSlack * (2 * kChunkBytes + kGradientBytes));
  EXPECT_GE(ours, kChunkBytes + kGradientBytes); // the test can fail
  const double composed = peak_of([&] {
    torch::cross_entropy_loss(
        torch::linear(layer.hidden, layer.weight), layer.targets)
        .backward();
  });
  EXPECT_GE(composed, 2 * kLogitsBytes);
}

TEST(LinearCrossEntropyMemoryTest, MakesNoGradientsWithoutGradMode) {
  const Layer layer;
  const double ours = peak_of([&] {
    const torch::NoGradGuard no_grad;
    linear_cross_entropy(
        layer.hidden, layer.weight, layer.targets, in_chunks());
  });
  EXPECT_LE(ours, kSlack * 2 * kChunkBytes);
}

TEST(LinearCrossEntropyMemoryTest, ALossByTokenHoldsNoMore) {
  const Layer layer;
  const double ours = peak_of([&] {
    linear_cross_entropy(
        layer.hidden,
        layer.weight,
        layer.targets,
        in_chunks().reduction(torch::kNone))
        .sum()
        .backward();
  });
  EXPECT_LE(ours, kSlack * (2 * kChunkBytes + kGradientBytes));
}

TEST(LinearCrossEntropyMemoryTest, BFloat16AddsACopyOfTheWeight) {
  const Layer layer(torch::kBFloat16);
  const double ours = peak_of([&] {
    linear_cross_entropy(layer.hidden, layer.weight, layer.targets, in_chunks())
        .backward();
  });
  const double weight_bytes = kMeasuredClasses * kMeasuredWidth * kFloat;
  EXPECT_LE(ours, kSlack * (2 * kChunkBytes + kGradientBytes + weight_bytes));
}

TEST(LinearCrossEntropyMemoryTest, ByDefaultAChunkHasAsManyElementsAsHidden) {
  const Layer layer;
  const double ours = peak_of([&] {
    linear_cross_entropy(layer.hidden, layer.weight, layer.targets).backward();
  });
  // 512 * 32 / 4096 would be 4 tokens: it is 128, the least.
  EXPECT_LE(
      ours, kSlack * (2 * 128 * kMeasuredClasses * kFloat + kGradientBytes));
}

TEST(LinearCrossEntropyMemoryTest, BackwardHandsItsMemoryOn) {
  const Layer layer;
  const testing::MemoryMeter meter;
  const auto loss = linear_cross_entropy(
      layer.hidden, layer.weight, layer.targets, in_chunks());
  const size_t before = meter.live_bytes();
  loss.backward();
  const auto after = static_cast<double>(meter.peak_bytes());
  EXPECT_LE(static_cast<double>(meter.live_bytes()), 1.001 * before);
  EXPECT_LE(after, kSlack * (2 * kChunkBytes + kGradientBytes));
}

} // namespace
} // namespace tessera
