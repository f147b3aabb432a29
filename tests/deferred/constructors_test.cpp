// What constructors do, recorded and replayed bit for bit.
#include <ATen/ScalarOps.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deferred/support.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture

TEST_F(DeferredInitTest, InitFunctionsMatchPlainConstruction) {
  namespace init = torch::nn::init;
  expect_as_plain(with([](Lambda& self) {
    const auto empty = [&](const std::string& name) {
      return self.param(name, torch::empty({12, 9}));
    };
    init::orthogonal_(empty("orthogonal"), 1.5);
    init::orthogonal_(self.param("wide", torch::empty({4, 3, 5})));
    init::xavier_normal_(empty("xavier_normal"));
    init::xavier_uniform_(empty("xavier_uniform"));
    init::kaiming_normal_(empty("kaiming_normal"));
    init::kaiming_uniform_(empty("kaiming_uniform"), std::sqrt(5));
    init::sparse_(empty("sparse"), 0.4);
    init::normal_(empty("normal"), 1, 2);
    init::uniform_(empty("uniform"), -1, 1);
    init::constant_(empty("constant"), 3.5);
    init::eye_(empty("eye"));
    init::zeros_(empty("zeros"));
    init::dirac_(self.param("dirac", torch::empty({4, 3, 3})));
    // As trunc_normal_ does, which LibTorch has in Python only.
    const torch::NoGradGuard no_grad;
    empty("truncated").uniform_(-0.9, 0.9).erfinv_().mul_(1.4).clamp_(-2, 2);
  }));
}

TEST_F(DeferredInitTest, FillsInPlaceMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    const auto empty = [&](const std::string& name) {
      return self.buffer(name, torch::empty({5, 7}));
    };
    empty("random").random_(0, 100);
    empty("bernoulli").bernoulli_(0.3);
    empty("exponential").exponential_(2);
    empty("cauchy").cauchy_();
    empty("log_normal").log_normal_();
    empty("geometric").geometric_(0.4);
    auto out = empty("out");
    at::normal_outf(torch::ones({5, 7}), 2., std::nullopt, out);
  }));
}

TEST_F(DeferredInitTest, FactoriesMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.buffer("arange", torch::arange(10));
    self.buffer("linspace", torch::linspace(0, 1, 7));
    self.buffer("eye", torch::eye(3, torch::kDouble));
    self.buffer("full", torch::full({2, 3}, 4.5));
    self.buffer("rand", torch::rand({3, 4}));
    self.buffer("randint", torch::randint(5, 50, {6}));
    self.buffer("randperm", torch::randperm(9));
    self.buffer("normal", torch::normal(1, 2, {3, 3}));
    self.buffer("window", torch::hann_window(8));
    self.buffer("triangle", torch::tril_indices(4, 4));
    self.buffer("strided", torch::empty_strided({2, 3}, {1, 2}).fill_(1));
    const auto base = torch::randn({4, 6}).t();
    self.buffer("like", torch::randn_like(base));
    self.buffer("bytes", torch::ones_like(base, torch::kByte));
    self.buffer("new_full", base.new_full({3}, 2, torch::kInt));
    self.buffer("options", torch::rand({2, 2}, base.options()));
    self.buffer("scalar", torch::scalar_tensor(2.5));
    self.buffer("complex", torch::complex(base, base * 2));
    self.buffer("nothing", torch::rand({0, 3}));
  }));
}

TEST_F(DeferredInitTest, ComputedTensorsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    const auto weight = torch::randn({6, 8});
    self.param("scaled", weight * 0.1);
    self.param("sum", 1 - weight / 3 + torch::ones({8}));
    self.param("product", weight.matmul(weight.t()));
    self.param("cat", torch::cat({weight, torch::rand({1, 8})}));
    self.param("half", weight.to(torch::kHalf));
    self.param("contiguous", weight.t().contiguous());
    self.param("dropped", torch::dropout(weight, 0.5, true));
    self.buffer("sorted", std::get<0>(weight.sort()));
    self.buffer("indices", std::get<1>(weight.sort()));
    self.buffer("mask", torch::ones({4, 4}).triu(1).to(torch::kBool));
    self.buffer("chosen", torch::multinomial(weight.square(), 3));
  }));
}

TEST_F(DeferredInitTest, OperatorsWithoutMetaKernelMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    const auto weight = torch::randn({6, 8});
    self.param("abs", weight.abs());
    self.param("abs_in_place", weight.clone().abs_());
    self.buffer("flip", weight.flip({0}));
    self.buffer("roll", weight.roll(2, 1));
    self.buffer("selected", weight.index_select(0, torch::arange(3)));
    const auto angles =
        torch::outer(torch::arange(5.), torch::pow(10, torch::arange(3.)));
    self.buffer("rotary", torch::polar(torch::ones_like(angles), angles));
    self.buffer("poisson", torch::poisson(weight.square()));
    self.buffer("after", torch::rand({3}));
  }));
}

/// An operator whose kernels for meta and for memory disagree.
at::Tensor to_columns(const at::Tensor& tensor) {
  return tensor.t().contiguous().t();
}
at::Tensor to_rows(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options());
}
at::Tensor same(const at::Tensor& tensor) {
  return tensor;
}
TORCH_LIBRARY(tessera_test, library) {
  library.def("columns(Tensor self) -> Tensor");
  library.impl("columns", c10::DispatchKey::CPU, to_columns);
  library.impl("columns", c10::DispatchKey::Meta, to_rows);
  library.def("same(Tensor self) -> Tensor");
  library.impl("same", c10::DispatchKey::CPU, same);
  library.impl("same", c10::DispatchKey::Meta, to_rows);
}

TEST_F(DeferredInitTest, KernelsThatDisagreeOnTheLayoutDoNoHarm) {
  const auto call = [](const char* name, const at::Tensor& tensor) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<at::Tensor(const at::Tensor&)>()
        .call(tensor);
  };
  torch::manual_seed(kSeed);
  const auto expected = torch::rand({3, 4});
  torch::manual_seed(kSeed);
  at::Tensor columns;
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::rand({3, 4});
    columns = call("tessera_test::columns", tensor);
    call("tessera_test::same", tensor).zero_();
    call("tessera_test::same", tensor).zero_();
    tensor = torch::cat({tensor, call("tessera_test::same", tensor).add_(1)});
  }
  EXPECT_TRUE(at::equal(replay(columns), expected));
  EXPECT_TRUE(at::equal(replay(columns[1]), expected[1]));
  EXPECT_TRUE(at::equal(replay(tensor), torch::cat({expected, expected + 1})));
}

TEST_F(DeferredInitTest, DryRunsMatchPlainConstruction) {
  // Constructors that learn sizes by running part of the model.
  expect_as_plain(with([](Lambda& self) {
    torch::nn::Sequential features(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
        torch::nn::BatchNorm2d(4),
        torch::nn::ReLU(),
        torch::nn::Dropout(0.5),
        torch::nn::AdaptiveAvgPool2d(2));
    self.child("features", features);
    const auto output = features->forward(torch::randn({2, 3, 8, 8}));
    self.child("head", torch::nn::Linear(output.numel() / 2, 3));
  }));
}

TEST_F(DeferredInitTest, ViewsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    const torch::NoGradGuard no_grad;
    auto weight = self.param("weight", torch::empty({12, 6}));
    for (const auto& part : weight.chunk(3)) {
      torch::nn::init::xavier_uniform_(part);
    }
    weight[5].zero_();
    weight.t()[2].normal_();
    weight.select(1, 4).mul_(weight.select(1, 3));
    weight.slice(0, 0, 2).copy_(weight.slice(0, 2, 4));
    weight.index_put_({torch::indexing::Slice(6, 8)}, 0.25);
    weight.index_put_({torch::tensor({1, 9})}, torch::rand({2, 6}));
    weight.view({-1}).slice(0, 60).data().add_(1);
    weight.detach().diagonal().fill_(2);
    weight.masked_fill_(weight > 1.5, 0.5);
    self.param("transposed", torch::rand({3, 4}).t());
    self.buffer("slice", torch::rand({10, 4}).slice(0, 3, 5));
    self.buffer("conjugate", torch::randn({3}, torch::kComplexDouble).conj());
    self.buffer(
        "imaginary",
        torch::imag(torch::randn({3}, torch::kComplexFloat).conj()));
    self.buffer("bits", torch::rand({4}).view(torch::kInt));
    auto turned = torch::rand({2, 5});
    turned.t_().unsqueeze_(0).add_(torch::arange(2.));
    self.buffer("turned", turned);
    auto grown = torch::ones({2});
    grown.resize_({5}).fill_(3);
    self.buffer("grown", grown);
    self.buffer("shared", torch::rand({2}).set_(weight));
    self.buffer("emptied", torch::rand({2}).set_());
  }));
}

TEST_F(DeferredInitTest, RealTensorsAreTakenAsTheyWere) {
  expect_as_plain(with([](Lambda& self) {
    const torch::NoGradGuard no_grad;
    const auto table = torch::tensor({{1., 2., 3.}, {4., 5., 6.}});
    ASSERT_FALSE(is_deferred(table));
    EXPECT_EQ(table[1][2].item<float>(), 6);
    EXPECT_EQ(torch::tensor(5).item<int>(), 5);
    EXPECT_EQ(torch::tensor(std::vector<int>{1, 2})[1].item<int>(), 2);
    const auto weight = self.param("weight", torch::rand({2, 3}));
    weight.mul_(table);
    weight.copy_(table.mul_(2).t().contiguous().t() + weight);
    self.buffer("sum", weight + table);
    self.buffer("expanded", table.expand_as(torch::empty({4, 2, 3})).clone());
    table.fill_(100);

    std::vector<float> memory(6, 0.5F);
    weight.add_(torch::from_blob(memory.data(), {2, 3}));
    memory.assign(6, 99.F);
    // Promotion depends on whether a scalar was a number.
    auto rounded = torch::rand({});
    for (int i = 0; i < 20; ++i) {
      rounded = rounded * at::native::wrapped_scalar_tensor(1.1);
    }
    self.buffer("number", rounded);
    self.buffer("scalar", torch::rand({}) + torch::tensor(.1, torch::kDouble));
    self.buffer("moved", torch::tensor({1., 2.}, weight.options()));
    self.buffer("like", torch::rand({2}) + table[0][0].to(weight));
  }));
}

TEST_F(DeferredInitTest, AnExpandedRealTensorIsRecordedAsItLies) {
  at::Tensor weight;
  {
    const DeferredInit deferred;
    weight = torch::empty({1 << 20, 1 << 20});
    weight.copy_(torch::tensor({2.F}).expand({1 << 20, 1 << 20}));
  }
  EXPECT_EQ(weight.dim(), 2);
}

TEST_F(DeferredInitTest, DtypeConversionsMatchPlainConstruction) {
  expect_as_plain([] {
    torch::nn::Sequential model(
        torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6));
    model->to(torch::kDouble);
    return model.ptr();
  });
  expect_as_plain([] {
    torch::nn::Sequential model(torch::nn::Linear(5, 6), torch::nn::LSTM(3, 4));
    model->to(torch::kCPU, torch::kBFloat16);
    model->to(torch::kCPU);
    return model.ptr();
  });
  expect_as_plain([] {
    torch::nn::Linear model(5, 6);
    return model->clone();
  });
}

TEST_F(DeferredInitTest, DefaultDtypeOfTheConstructionCounts) {
  struct Reset {
    ~Reset() {
      torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    }
  };
  expect_as_plain(with([](Lambda& self) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    const Reset reset;
    self.param("weight", torch::rand({3}));
    self.buffer("quotient", torch::arange(4) / 3);
  }));
}

TEST_F(DeferredInitTest, TiedTensorsStayTied) {
  const Make make = with([](Lambda& self) {
    const auto embedding = self.child("embedding", torch::nn::Embedding(8, 4));
    self.child("head", torch::nn::Linear(4, 8))
        ->weight.set_data(embedding->weight);
    self.param("again", embedding->weight);
    const auto base = self.buffer("base", torch::rand({3, 5}));
    self.buffer("view", base.t());
    const auto hidden = torch::rand({6});
    self.buffer("first", hidden.slice(0, 0, 3));
    self.buffer("last", hidden.slice(0, 2));
  });
  expect_as_plain(make);

  const auto module = make_deferred(make);
  materialize(*module);
  const auto parameters = module->named_parameters();
  EXPECT_TRUE(parameters["again"].is_same(parameters["embedding.weight"]));
  EXPECT_TRUE(
      parameters["head.weight"].is_alias_of(parameters["embedding.weight"]));
  const auto buffers = module->named_buffers();
  EXPECT_TRUE(buffers["view"].is_view());
  EXPECT_TRUE(buffers["view"]._base().is_same(buffers["base"]));
  EXPECT_TRUE(buffers["first"].is_alias_of(buffers["last"]));
  EXPECT_TRUE(buffers["first"]._base().is_cpu());
  EXPECT_EQ(num_live_tapes(), 0);
  buffers["base"].fill_(3);
  EXPECT_EQ(buffers["view"].sum().item<float>(), 45);
}

TEST_F(DeferredInitTest, HoldersOfAParameterSeeItMaterialized) {
  std::shared_ptr<torch::nn::LinearImpl> linear;
  at::Tensor held;
  {
    const DeferredInit deferred;
    linear = std::make_shared<torch::nn::LinearImpl>(3, 4);
    held = linear->weight;
    linear->bias.requires_grad_(false);
  }
  const auto* impl = linear->weight.unsafeGetTensorImpl();
  EXPECT_TRUE(linear->weight.is_meta());
  materialize(*linear);
  EXPECT_EQ(linear->weight.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(held.is_cpu());
  EXPECT_TRUE(held.requires_grad());
  EXPECT_FALSE(linear->bias.requires_grad());
  held.square().sum().backward();
  EXPECT_TRUE(at::equal(linear->weight.grad(), 2 * held.detach()));
  materialize(*linear); // nothing is left to do
}

TEST_F(DeferredInitTest, AModuleUsedBeforeTrainsAfterwards) {
  torch::nn::Linear linear{nullptr};
  {
    const DeferredInit deferred;
    linear = torch::nn::Linear(3, 4);
    // The gradient accumulators of the parameters now expect meta.
    linear->forward(torch::rand({2, 3}));
  }
  const auto kept = linear->forward(torch::rand({2, 3}));
  EXPECT_TRUE(is_deferred(kept));
  materialize(*linear);
  linear->forward(torch::rand({2, 3})).sum().backward();
  EXPECT_TRUE(linear->weight.grad().is_cpu());
}

} // namespace
} // namespace tessera
