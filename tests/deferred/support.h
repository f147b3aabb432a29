// Compares models whose construction was deferred with plain ones.
#pragma once

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "deferred/deferred_tensor.h"
#include "deferred/replay.h"
#include "deferred/tape.h"

namespace tessera::testing::deferral {

using deferred::replay;
using deferred::testing::num_live_tapes;
using torch::nn::Module;

using Make = std::function<std::shared_ptr<Module>()>;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

inline constexpr uint64_t kSeed = 7;

/// A module whose constructor is a function.
struct Lambda : Module {
  explicit Lambda(const std::function<void(Lambda&)>& construct) {
    construct(*this);
  }
  at::Tensor param(const std::string& name, at::Tensor tensor) {
    return register_parameter(name, std::move(tensor));
  }
  at::Tensor buffer(const std::string& name, at::Tensor tensor) {
    return register_buffer(name, std::move(tensor));
  }
  template <class T>
  T child(const std::string& name, T module) {
    return register_module(name, std::move(module));
  }
};

inline Make with(std::function<void(Lambda&)> construct) {
  return [construct] { return std::make_shared<Lambda>(construct); };
}

/// Parameters, then buffers.
inline Named tensors_of(const Module& module) {
  Named tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

inline std::shared_ptr<Module> make_plain(const Make& make) {
  torch::manual_seed(kSeed);
  return make();
}

inline std::shared_ptr<Module> make_deferred(const Make& make) {
  torch::manual_seed(kSeed);
  const DeferredInit deferred;
  return make();
}

inline at::Tensor values_of(const at::Tensor& tensor) {
  return is_deferred(tensor) ? replay(tensor) : tensor.detach();
}

inline void expect_same(
    const std::string& name,
    const at::Tensor& actual,
    const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << name;
  EXPECT_EQ(actual.strides(), expected.strides()) << name;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << name;
  EXPECT_EQ(actual.device(), expected.device()) << name;
  EXPECT_TRUE(at::equal(actual, expected)) << name;
}

inline int num_deferred(const Module& module) {
  int count = 0;
  for (const auto& [name, tensor] : tensors_of(module)) {
    count += is_deferred(tensor);
  }
  return count;
}

/// Materializes each tensor alone on a tape of its own, all tensors in reverse
/// order, and all in place.
inline void expect_as_plain(const Make& make) {
  const auto plain = make_plain(make);
  const Named expected = tensors_of(*plain);
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto module = make_deferred(make);
    const Named tensors = tensors_of(*module);
    ASSERT_EQ(tensors.size(), expected.size());
    expect_same(
        tensors[i].first, values_of(tensors[i].second), expected[i].second);
  }
  const auto module = make_deferred(make);
  EXPECT_GT(num_deferred(*module), 0);
  const Named tensors = tensors_of(*module);
  for (int round = 0; round < 2; ++round) {
    for (size_t i = tensors.size(); i-- > 0;) {
      expect_same(
          tensors[i].first, values_of(tensors[i].second), expected[i].second);
    }
  }
  materialize(*module);
  EXPECT_EQ(num_deferred(*module), 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    expect_same(tensors[i].first, tensors[i].second, expected[i].second);
    EXPECT_EQ(
        tensors[i].second.requires_grad(), expected[i].second.requires_grad())
        << tensors[i].first;
    EXPECT_EQ(tensors[i].second.is_leaf(), expected[i].second.is_leaf());
  }
}

/// The text of the error that `act` throws.
inline std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class DeferredInitTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(num_live_tapes(), 0) << "a tape leaked";
  }
};

} // namespace tessera::testing::deferral
