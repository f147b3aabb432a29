// What the tests of recompute() share: values, and calls with and without
// recompute().
#pragma once

#include <tessera/recompute/recompute.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace tessera::testing::recomputation {

using Tensors = std::vector<at::Tensor>;

inline constexpr int64_t kVocabulary = 11;
inline constexpr int64_t kWidth = 6;
inline constexpr int64_t kDepth = 4;

inline at::Tensor noise(at::IntArrayRef sizes, int seed = 0) {
  torch::manual_seed(100 + seed);
  return torch::randn(sizes);
}

inline at::Tensor leaf(at::IntArrayRef sizes, int seed = 0) {
  return noise(sizes, seed).requires_grad_();
}

/// Expects the same bits, or values within `tolerance` of the largest one; or
/// that neither is defined.
inline void expect_same(
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

/// Expects the same results of `body` with plain calls and with calls under
/// recompute().
inline void expect_no_difference(
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

} // namespace tessera::testing::recomputation
