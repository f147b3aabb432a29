#include "parity/support.h"

namespace tessera::parity {

::testing::AssertionResult is_close(
    const at::Tensor& actual,
    const at::Tensor& expected) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
        ? ::testing::AssertionSuccess()
        : ::testing::AssertionFailure() << "one of them is undefined";
  }
  if (actual.sizes() != expected.sizes() ||
      actual.scalar_type() != expected.scalar_type()) {
    return ::testing::AssertionFailure()
        << actual.toString() << actual.sizes() << " against "
        << expected.toString() << expected.sizes();
  }
  const auto [relative, absolute] = [&]() -> std::pair<double, double> {
    switch (expected.scalar_type()) {
      case at::kDouble:
        return {1e-7, 1e-7};
      case at::kFloat:
        return {1.3e-6, 1e-5};
      case at::kHalf:
        return {1e-3, 1e-5};
      case at::kBFloat16:
        return {1.6e-2, 1e-5};
      default:
        return {0, 0};
    }
  }();
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble);
  const at::Tensor b = expected.detach().to(at::kCPU, at::kDouble);
  if (torch::allclose(a, b, relative, absolute)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
      << "largest difference " << (a - b).abs().max().item<double>();
}

LeafRuns::~LeafRuns() {
  ::testing::Test::RecordProperty("leaf_runs", count_);
}

void LeafRuns::run(const std::string& name, const std::function<void()>& body) {
  ++count_;
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, name);
  body();
  world_.barrier("end of leaf run");
}

} // namespace tessera::parity
