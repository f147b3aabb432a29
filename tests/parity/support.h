// What the parity tests have in common.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/fsdp/fsdp.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace tessera::parity {

/// Equal as torch.testing.assert_close has it: shape, dtype, and values within
/// the tolerances of the dtype.
::testing::AssertionResult is_close(
    const at::Tensor& actual,
    const at::Tensor& expected);

/// Counts the runs that a test expands into, and leaves the number in the XML
/// report, where check_parity.py compares it with PyTorch's.
class LeafRuns {
 public:
  explicit LeafRuns(const Group& world) : world_(world) {}
  ~LeafRuns();

  /// Runs `body` under a trace of `name`; then all ranks meet.
  void run(const std::string& name, const std::function<void()>& body);

 private:
  const Group world_;
  int count_ = 0;
};

/// Expects that `body` throws an E whose text contains `text`.
template <class E>
void expect_throws(const std::function<void()>& body, const char* text) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown, expected: " << text;
  } catch (const E& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type was thrown: " << error.what();
  }
}

/// FSDP over a module of any type.
inline void fsdp(
    const std::shared_ptr<torch::nn::Module>& module,
    const FSDPOptions& options) {
  FSDP<torch::nn::Module>(module, options);
}

} // namespace tessera::parity
