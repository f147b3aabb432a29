// What the parity tests have in common.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/state/state_dict.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "parity/models.h"
#include "support/device.h"

namespace tessera::parity {

inline constexpr bool kBooleans[] = {false, true};

/// "name" or "not name", for the name of a leaf run.
std::string text(const char* name, bool value);

/// Equal as torch.testing.assert_close has it: shape, dtype, and values within
/// the tolerances of the dtype.
::testing::AssertionResult is_close(
    const at::Tensor& actual,
    const at::Tensor& expected);
/// The same for dictionaries of float32 values, wherever they are. For sharded
/// tensors, this rank's pieces are compared.
::testing::AssertionResult is_close(
    const StateDict& actual,
    const StateDict& expected);

/// Notes the runs that a test expands into, and leaves their names and their
/// device in the XML report, where check_parity.py compares them with
/// PyTorch's.
class LeafRuns {
 public:
  /// Extra: runs that PyTorch does not make, which do not count.
  enum class Kind { PyTorch, Extra };
  explicit LeafRuns(
      const Group& world,
      Kind kind = Kind::PyTorch,
      at::Device device = testing::test_device())
      : world_(world), kind_(kind), device_(device) {}
  ~LeafRuns();

  /// Runs `body` under a trace of `name`; then all ranks meet.
  void run(const std::string& name, const std::function<void()>& body);

 private:
  const Group world_;
  const Kind kind_;
  const at::Device device_; // where models and inputs are
  std::vector<std::string> names_;
};

/// Runs `body` on two ranks, where its leaf runs count, and again on four,
/// where they do not: there some ranks have nothing of small parameters. `body`
/// uses `device`.
void on_two_and_four_ranks(
    const std::function<void(const Group& world, LeafRuns& leaves)>& body,
    at::Device device = testing::test_device());

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

/// The transformer as five units: its layers, and the rest.
FSDP<TransformerWithSharedParamsImpl> make_recursive_transformer(
    const FSDPOptions& options);

} // namespace tessera::parity
