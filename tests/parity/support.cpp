#include "parity/support.h"

#include "support/ranks.h"

namespace tessera::parity {

std::string text(const char* name, bool value) {
  return std::string(value ? "" : "not ") + name + " ";
}

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

::testing::AssertionResult is_close(
    const StateDict& actual,
    const StateDict& expected) {
  const std::string lines = diff_state_dicts(
      actual, expected, DiffTolerance{.rtol = 1.3e-6, .atol = 1e-5});
  return lines.empty() ? ::testing::AssertionSuccess()
                       : ::testing::AssertionFailure() << lines;
}

LeafRuns::~LeafRuns() {
  if (kind_ == Kind::Extra) {
    return;
  }
  std::string names;
  for (const std::string& name : names_) {
    names += name + ";";
  }
  ::testing::Test::RecordProperty("leaves", names);
  ::testing::Test::RecordProperty(
      "device", c10::DeviceTypeName(device_.type(), /*lower_case=*/true));
}

void LeafRuns::run(const std::string& name, const std::function<void()>& body) {
  names_.push_back(name);
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, name);
  body();
  world_.barrier("end of leaf run");
}

void on_two_and_four_ranks(
    const std::function<void(const Group& world, LeafRuns& leaves)>& body,
    at::Device device) {
  testing::on_ranks(2, [&](const Group& world) {
    LeafRuns leaves(world, LeafRuns::Kind::PyTorch, device);
    body(world, leaves);
  });
  testing::on_ranks(4, [&](const Group& world) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, "4 ranks");
    LeafRuns leaves(world, LeafRuns::Kind::Extra, device);
    body(world, leaves);
  });
}

FSDP<TransformerWithSharedParamsImpl> make_recursive_transformer(
    const FSDPOptions& options) {
  auto model = make_transformer();
  model->to(testing::test_device());
  return FSDP(
      model,
      FSDPOptions(options).auto_wrap_policy(
          module_wrap_policy<
              torch::nn::TransformerEncoderLayer,
              torch::nn::TransformerDecoderLayer>()));
}

} // namespace tessera::parity
