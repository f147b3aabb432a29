// What deferred construction rejects.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "deferred/support.h"
#include "libtorch/compat.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST_F(DeferredInitTest, RejectsReadingValues) {
  const DeferredInit deferred;
  const auto tensor = torch::rand({3, 4});
  const auto expect_refused = [&](const std::string& call,
                                  const std::function<void()>& read) {
    const auto our_words = AllOf(
        HasSubstr("[" + call + "]"),
        HasSubstr("a deferred tensor has no values yet"),
        HasSubstr(
            "Construct the model without DeferredInit, or do this after materialize() or sharding"));
    if (call == "data_ptr" && kTorchVersion < 213) {
      EXPECT_THAT(error_of(read), AnyOf(our_words, HasSubstr("not allocated")));
    } else {
      EXPECT_THAT(error_of(read), our_words);
    }
  };
  expect_refused("aten::item", [&] { tensor.sum().item<float>(); });
  expect_refused("aten::item", [&] { tensor[0][0].item<double>(); });
  expect_refused("aten::is_nonzero", [&] { tensor.sum().is_nonzero(); });
  expect_refused("aten::equal", [&] { tensor.equal(tensor); });
  expect_refused("aten::allclose", [&] { tensor.allclose(tensor); });
  expect_refused("aten::nonzero", [&] { tensor.nonzero(); });
  expect_refused(
      "aten::masked_select", [&] { tensor.masked_select(tensor > 0); });
  expect_refused("aten::_unique2", [&] { at::_unique2(tensor); });
  expect_refused("data_ptr", [&] { tensor.data_ptr<float>(); });
  if (kTorchVersion >= 213) { // before that a null pointer, as for all of meta
    expect_refused("data_ptr", [&] { tensor.const_data_ptr(); });
  }
  expect_refused("data_ptr", [&] { tensor.accessor<float, 2>(); });
  expect_refused("data_ptr", [&] { at::tensor({1.F, 2.F}); });
  expect_refused("data_ptr", [&] {
    std::ostringstream text;
    text << tensor;
  });
}

TEST_F(DeferredInitTest, RejectsReadingValuesAfterTheGuard) {
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::rand({3});
  }
  EXPECT_THAT(
      error_of([&] { tensor.max().item<float>(); }),
      HasSubstr("[aten::item] a deferred tensor has no values yet"));
}

TEST_F(DeferredInitTest, RejectsWritingItsValuesToMemory) {
  const auto memory = torch::zeros({3});
  const DeferredInit deferred;
  const auto tensor = torch::rand({3});
  for (const std::function<void()>& write : std::vector<std::function<void()>>{
           [&] { memory.copy_(tensor); },
           [&] { memory.add_(tensor); },
           [&] {
             at::Tensor out = memory;
             at::mul_out(out, tensor, tensor);
           },
           [&] { memory.index_put_({torch::tensor({1})}, tensor[0]); }}) {
    EXPECT_THAT(
        error_of(write),
        HasSubstr(
            "this operation would write values that depend on a deferred"));
  }
}

TEST_F(DeferredInitTest, RejectsMetaTensorsOfUnknownValues) {
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::rand({3});
  }
  const auto unknown = torch::empty({3}, torch::kMeta);
  EXPECT_THAT(
      error_of([&] { tensor.add_(unknown); }),
      AllOf(
          HasSubstr("[aten::add_]"),
          HasSubstr("a meta tensor that is not deferred"),
          HasSubstr("Create the meta tensor under DeferredInit too")));
  EXPECT_THAT(
      error_of([&] { tensor.set_data(unknown); }),
      HasSubstr("a meta tensor that is not deferred"));
  EXPECT_THAT(
      error_of([&] { tensor.set_(unknown); }),
      HasSubstr("a meta tensor that is not deferred"));
  EXPECT_THAT(
      error_of([&] { tensor.set_(unknown.storage()); }),
      HasSubstr("a storage without memory"));
}

TEST_F(DeferredInitTest, RejectsParametersWithAHistory) {
  const auto module = make_deferred(with([](Lambda& self) {
    const auto linear = self.child("linear", torch::nn::Linear(3, 4));
    self.param("scaled", linear->weight * 0.1);
    self.buffer("size", linear->weight.abs());
  }));
  EXPECT_THAT(
      error_of([&] { materialize(*module); }),
      AllOf(
          HasSubstr("[materialize] parameter \"scaled\""),
          HasSubstr("MulBackward"),
          HasSubstr("NoGradGuard")));
  EXPECT_EQ(replay(module->named_parameters()["scaled"]).numel(), 12);
  EXPECT_NE(module->named_buffers()["size"].grad_fn(), nullptr);
}

TEST_F(DeferredInitTest, RejectsInferenceMode) {
  const DeferredInit deferred;
  const c10::InferenceMode inference;
  EXPECT_THAT(
      error_of([] { torch::rand({3}); }), HasSubstr("inference mode is on"));
}

TEST_F(DeferredInitTest, RejectsAutocastThatWouldChangeValues) {
  const DeferredInit deferred;
  const auto tensor = torch::rand({3, 3});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(error_of([&] { tensor.mul_(2); }), "no error");
  EXPECT_THAT(
      error_of([&] { tensor.matmul(tensor); }),
      AllOf(HasSubstr("[aten::matmul]"), HasSubstr("autocast")));
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST_F(DeferredInitTest, RejectsSparseResults) {
  const DeferredInit deferred;
  const auto tensor = torch::rand({3, 3});
  EXPECT_THAT(
      error_of([&] {
        torch::sparse_coo_tensor(
            torch::zeros({2, 4}, torch::kLong), torch::rand({4}), {3, 3});
      }),
      HasSubstr("only dense tensors can be deferred"));
  const auto sparse = torch::zeros({3, 3}, torch::kSparse);
  EXPECT_FALSE(is_deferred(sparse));
  EXPECT_THAT(
      error_of([&] { tensor.add(sparse); }), HasSubstr("sparse or quantized"));
}

TEST_F(DeferredInitTest, RejectsTensorsOfTwoThreads) {
  at::Tensor mine;
  at::Tensor other;
  std::thread([&] {
    const DeferredInit deferred;
    other = torch::rand({3});
  }).join();
  const DeferredInit deferred;
  mine = torch::rand({3});
  EXPECT_THAT(
      error_of([&] { mine.add_(other); }), HasSubstr("different threads"));
}

TEST_F(DeferredInitTest, ErrorsOfTheOperatorsThemselvesPass) {
  const DeferredInit deferred;
  EXPECT_THAT(
      error_of([] { torch::rand({3}).add_(torch::rand({4})); }),
      HasSubstr("must match the size of tensor b"));
}

} // namespace
} // namespace tessera
