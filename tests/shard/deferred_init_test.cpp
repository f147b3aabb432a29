// A model that is constructed without memory gets the values that plain
// construction gives, bit for bit.
#include "deferred/deferred_init.h"

#include <tessera/error.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <atomic>
#include <sstream>
#include <thread>

#include "deferred/deferred_tensor.h"
#include "deferred/tape.h"
#include "libtorch/compat.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using engine::intended_device;
using engine::replay;
using engine::testing::num_live_tapes;
using tessera::testing::MemoryMeter;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using torch::nn::Module;

using Make = std::function<std::shared_ptr<Module>()>;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

constexpr uint64_t kSeed = 7;

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

Make with(std::function<void(Lambda&)> construct) {
  return [construct] { return std::make_shared<Lambda>(construct); };
}

/// Parameters, then buffers.
Named tensors_of(const Module& module) {
  Named tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

std::shared_ptr<Module> make_plain(const Make& make) {
  torch::manual_seed(kSeed);
  return make();
}

std::shared_ptr<Module> make_deferred(const Make& make) {
  torch::manual_seed(kSeed);
  const DeferredInit deferred;
  return make();
}

at::Tensor values_of(const at::Tensor& tensor) {
  return is_deferred(tensor) ? replay(tensor) : tensor.detach();
}

void expect_same(
    const std::string& name,
    const at::Tensor& actual,
    const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << name;
  EXPECT_EQ(actual.strides(), expected.strides()) << name;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << name;
  EXPECT_EQ(actual.device(), expected.device()) << name;
  EXPECT_TRUE(at::equal(actual, expected)) << name;
}

int num_deferred(const Module& module) {
  int count = 0;
  for (const auto& [name, tensor] : tensors_of(module)) {
    count += is_deferred(tensor);
  }
  return count;
}

/// Each alone on a tape of its own, all in reverse order, and in place.
void expect_as_plain(const Make& make) {
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

/// How often uniform_ was called.
std::atomic<int> num_draws = 0;

/// The text of the error that `act` throws.
std::string error_of(const std::function<void()>& act) {
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

// ---- Kinds of modules ----

TEST_F(DeferredInitTest, LayersMatchPlainConstruction) {
  expect_as_plain([] {
    return torch::nn::Sequential(
               torch::nn::Linear(64, 48),
               torch::nn::ReLU(),
               torch::nn::LayerNorm(torch::nn::LayerNormOptions({48})),
               torch::nn::Dropout(0.3),
               torch::nn::Bilinear(5, 6, 7),
               torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 8, 3)),
               torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3).groups(2)),
               torch::nn::ConvTranspose2d(
                   torch::nn::ConvTranspose2dOptions(3, 8, 3)),
               torch::nn::BatchNorm2d(8),
               torch::nn::InstanceNorm1d(
                   torch::nn::InstanceNorm1dOptions(4).affine(true)),
               torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 8)),
               torch::nn::PReLU(),
               torch::nn::Linear(48, 3))
        .ptr();
  });
}

TEST_F(DeferredInitTest, EmbeddingsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "padded",
        torch::nn::Embedding(
            torch::nn::EmbeddingOptions(10, 16).padding_idx(3)));
    self.child("plain", torch::nn::Embedding(20, 17));
    self.child("bag", torch::nn::EmbeddingBag(11, 5));
  }));
}

TEST_F(DeferredInitTest, RecurrentNetsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "lstm",
        torch::nn::LSTM(
            torch::nn::LSTMOptions(9, 5).num_layers(2).bidirectional(true)));
    self.child("gru", torch::nn::GRU(5, 3));
    self.child("rnn", torch::nn::RNN(5, 3));
    self.child("cell", torch::nn::LSTMCell(4, 6));
  }));
}

TEST_F(DeferredInitTest, TransformersMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "encoder",
        torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
            torch::nn::TransformerEncoderLayerOptions(16, 2), 2)));
    self.child(
        "decoder",
        torch::nn::TransformerDecoderLayer(
            torch::nn::TransformerDecoderLayerOptions(16, 2)));
    self.child(
        "attention",
        torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2)
                                          .kdim(4)
                                          .vdim(6)
                                          .add_bias_kv(true)));
  }));
}

TEST_F(DeferredInitTest, MaterializedModelsComputeAsPlainOnes) {
  const Make make = with([](Lambda& self) {
    self.child("lstm", torch::nn::LSTM(4, 6));
    self.child("norm", torch::nn::BatchNorm1d(6));
    self.child("head", torch::nn::Linear(6, 2));
  });
  const auto run = [](Module& module) {
    auto children = module.named_children();
    const auto input = torch::arange(24.).reshape({3, 2, 4});
    auto output =
        std::get<0>(children["lstm"]->as<torch::nn::LSTM>()->forward(input));
    output = children["norm"]->as<torch::nn::BatchNorm1d>()->forward(output[0]);
    output = children["head"]->as<torch::nn::Linear>()->forward(output);
    output.square().sum().backward();
    return output;
  };
  const auto plain = make_plain(make);
  const auto module = make_deferred(make);
  materialize(*module);
  EXPECT_TRUE(at::equal(run(*module), run(*plain)));
  const auto expected = plain->parameters();
  const auto parameters = module->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].grad(), expected[i].grad()));
  }
}

// ---- What constructors do ----

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

// ---- Random numbers ----

TEST_F(DeferredInitTest, SeedsInsideConstructorsAreSeen) {
  expect_as_plain(with([](Lambda& self) {
    self.child("first", torch::nn::Linear(5, 6));
    torch::manual_seed(3);
    self.child("second", torch::nn::Linear(5, 6));
    torch::manual_seed(3); // the same again
    self.child("third", torch::nn::Linear(5, 6));
    torch::manual_seed(kSeed);
    self.child("fourth", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, StatesRestoredInsideConstructorsAreSeen) {
  expect_as_plain(with([](Lambda& self) {
    auto generator = at::detail::getDefaultCPUGenerator();
    self.child("first", torch::nn::Linear(5, 6));
    const auto state = generator.get_state();
    torch::manual_seed(3);
    self.child("second", torch::nn::Linear(5, 6));
    generator.set_state(state);
    self.child("third", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, OddNormalDrawsKeepTheirPairs) {
  // Few normal numbers are drawn in pairs, and the second one is kept.
  expect_as_plain(with([](Lambda& self) {
    self.buffer("one", torch::randn({1}));
    self.buffer("three", torch::randn({3}, torch::kDouble));
    self.buffer("many", torch::randn({17}));
    self.buffer("two", torch::randn({2}));
    self.buffer("strided", torch::empty({20, 2}).select(1, 0).normal_());
  }));
}

TEST_F(DeferredInitTest, GeneratorsOfTheCallersAreUsed) {
  expect_as_plain(with([](Lambda& self) {
    auto own = at::make_generator<at::CPUGeneratorImpl>(5);
    self.buffer("a", torch::empty({20}).normal_(0, 1, own));
    self.buffer("b", torch::rand({20}));
    self.buffer("c", torch::rand({20}, own));
    const auto copy = own.clone();
    self.buffer("d", torch::rand({20}, own));
    self.buffer("e", torch::rand({20}, copy));
    own.set_current_seed(5);
    self.buffer("f", torch::rand({20}, own));
  }));
}

TEST_F(DeferredInitTest, RealDrawsInBetweenMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child("first", torch::nn::Linear(5, 6));
    const auto drawn = torch::tensor({0., 0.}).normal_();
    self.buffer("drawn", drawn);
    self.child("second", torch::nn::Linear(5, 6));
    self.buffer("shuffled", torch::rand_like(drawn));
    self.child("third", torch::nn::Linear(5, 6));
  }));
}

TEST_F(DeferredInitTest, ResettingParametersMatchesPlainConstruction) {
  expect_as_plain([] {
    torch::nn::Sequential model(
        torch::nn::Linear(5, 6),
        torch::nn::Linear(6, 7),
        torch::nn::Linear(7, 8));
    model->apply([](Module& module) {
      if (auto* linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::normal_(linear->weight, 0, 0.02);
        torch::nn::init::zeros_(linear->bias);
      }
    });
    return model.ptr();
  });
}

TEST_F(DeferredInitTest, ReplayRestoresTheGenerator) {
  const auto module = make_deferred([] {
    return torch::nn::Sequential(
               torch::nn::Linear(4, 4), torch::nn::Linear(4, 4))
        .ptr();
  });
  torch::manual_seed(21);
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  replay(module->parameters()[2]);
  EXPECT_TRUE(
      at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  materialize(*module);
  EXPECT_TRUE(
      at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), 21U);
}

TEST_F(DeferredInitTest, DrawsAfterwardsAreReproducible) {
  const auto draw = [] {
    make_deferred([] { return torch::nn::Linear(4, 4).ptr(); });
    EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), kSeed);
    return torch::rand({3});
  };
  EXPECT_TRUE(at::equal(draw(), draw()));
}

TEST_F(DeferredInitTest, GuardsInARowMatchPlainConstruction) {
  for (const bool materialize_first : {false, true}) {
    torch::manual_seed(kSeed);
    torch::nn::Linear plain_actor(5, 6);
    torch::nn::Linear plain_critic(5, 6);
    torch::manual_seed(kSeed);
    torch::nn::Linear actor{nullptr};
    torch::nn::Linear critic{nullptr};
    {
      const DeferredInit deferred;
      actor = torch::nn::Linear(5, 6);
    }
    if (materialize_first) {
      materialize(*actor);
      EXPECT_EQ(num_live_tapes(), 0);
    }
    {
      const DeferredInit deferred;
      critic = torch::nn::Linear(5, 6);
    }
    materialize(*critic);
    materialize(*actor);
    expect_same("critic", critic->weight, plain_critic->weight);
    expect_same("actor", actor->bias, plain_actor->bias);
  }
}

// ---- After the guard, around it, on other threads ----

TEST_F(DeferredInitTest, InitialisationAfterTheGuardIsRecorded) {
  const auto finish = [](Module& module) {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : module.parameters()) {
      torch::nn::init::normal_(parameter, 0, 0.02);
      parameter.mul_(2);
    }
    module.to(torch::kDouble);
  };
  const Make make = [] {
    return torch::nn::Sequential(
               torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6))
        .ptr();
  };
  const auto plain = make_plain(make);
  finish(*plain);
  const auto module = make_deferred(make);
  std::thread([&] { finish(*module); }).join();
  EXPECT_EQ(num_deferred(*module), 6);
  materialize(*module);
  const Named expected = tensors_of(*plain);
  const Named tensors = tensors_of(*module);
  for (size_t i = 0; i < tensors.size(); ++i) {
    expect_same(tensors[i].first, tensors[i].second, expected[i].second);
  }
}

TEST_F(DeferredInitTest, MovingToADeviceAfterTheGuardIsRecorded) {
  const auto module =
      make_deferred([] { return torch::nn::Linear(3, 4).ptr(); });
  module->to(torch::kCPU);
  EXPECT_EQ(num_deferred(*module), 2);
  EXPECT_EQ(intended_device(module->parameters()[0]), at::Device(at::kCPU));
  if (!torch::cuda::is_available()) {
    EXPECT_THAT(
        error_of([&] { module->to(torch::kCUDA); }),
        HasSubstr("asks for device cuda, and this process has none"));
  }
}

TEST_F(DeferredInitTest, GuardsNest) {
  at::Tensor outer;
  at::Tensor inner;
  {
    const DeferredInit first;
    {
      const DeferredInit second;
      inner = torch::rand({2});
    }
    outer = torch::rand({2});
  }
  EXPECT_TRUE(is_deferred(inner));
  EXPECT_TRUE(is_deferred(outer));
  EXPECT_FALSE(is_deferred(torch::rand({2})));
  EXPECT_FALSE(is_deferred(torch::empty({2}, torch::kMeta)));
  EXPECT_FALSE(is_deferred(at::Tensor()));
}

TEST_F(DeferredInitTest, OtherThreadsAreLeftAlone) {
  const DeferredInit deferred;
  std::thread([] { EXPECT_FALSE(is_deferred(torch::rand({2}))); }).join();
}

TEST_F(DeferredInitTest, ReplayUnderTheGuardInferenceModeAndAutocast) {
  const auto plain = make_plain([] { return torch::nn::Linear(64, 64).ptr(); });
  torch::manual_seed(kSeed);
  const DeferredInit deferred;
  torch::nn::Linear linear(64, 64);
  const auto product = [&] {
    const torch::NoGradGuard no_grad;
    return linear->weight.matmul(linear->weight);
  }();
  at::Tensor values;
  {
    const c10::InferenceMode inference;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    values = replay(product);
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  EXPECT_FALSE(is_deferred(values));
  EXPECT_FALSE(values.is_inference());
  const auto weight = plain->parameters()[0].detach();
  c10::impl::ExcludeDispatchKeyGuard off(engine::kDeferredKey);
  EXPECT_TRUE(at::equal(values, weight.matmul(weight)));
}

TEST_F(DeferredInitTest, MetaTensorsThatAreMeantStayMeta) {
  const DeferredInit deferred;
  const auto meta = torch::rand({2}, torch::kMeta);
  EXPECT_TRUE(meta.is_meta());
  EXPECT_FALSE(is_deferred(meta));
}

TEST_F(DeferredInitTest, PinnedMemoryIsNotAskedForYet) {
  const DeferredInit deferred;
  const auto options = at::TensorOptions().pinned_memory(true);
  EXPECT_TRUE(is_deferred(torch::zeros({3}, options)));
}

TEST_F(DeferredInitTest, SettingDataSwapsMemoryInAndOut) {
  torch::nn::Linear linear{nullptr};
  auto memory = torch::zeros({2});
  {
    const DeferredInit deferred;
    linear = torch::nn::Linear(2, 3);
    linear->bias.set_data(torch::tensor({1.F, 2.F, 3.F}));
    EXPECT_FALSE(is_deferred(linear->bias));
    memory.set_data(torch::ones({3}));
    EXPECT_TRUE(is_deferred(memory));
  }
  EXPECT_TRUE(linear->bias.requires_grad());
  linear->weight.set_data(torch::full({3, 2}, 4.F));
  EXPECT_FALSE(is_deferred(linear->weight));
  EXPECT_EQ(linear->weight.sum().item<float>(), 24);
  EXPECT_EQ(linear->bias.sum().item<float>(), 6);
  EXPECT_EQ(replay(memory).sum().item<float>(), 3);
  EXPECT_EQ(memory.set_(torch::full({4}, 2.F)).sum().item<float>(), 8);
  linear->forward(torch::ones({1, 2})).sum().backward();
  EXPECT_EQ(linear->bias.grad().numel(), 3);
}

TEST_F(DeferredInitTest, ThreadsMayReplayAtTheSameTime) {
  const Make make = [] {
    return torch::nn::Sequential(
               torch::nn::Linear(40, 50), torch::nn::Linear(50, 60))
        .ptr();
  };
  const Named expected = tensors_of(*make_plain(make));
  const auto one = make_deferred(make);
  std::shared_ptr<Module> other;
  std::thread([&] { other = make_deferred(make); }).join();
  std::vector<std::thread> threads;
  for (const auto& module : {one, other, one, other}) {
    threads.emplace_back([&expected, module] {
      const Named tensors = tensors_of(*module);
      for (size_t i = tensors.size(); i-- > 0;) {
        EXPECT_TRUE(at::equal(replay(tensors[i].second), expected[i].second));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST_F(DeferredInitTest, SavingADeferredModelThrows) {
  torch::nn::Linear linear{nullptr};
  {
    const DeferredInit deferred;
    linear = torch::nn::Linear(3, 4);
  }
  std::stringstream file;
  EXPECT_THAT(
      error_of([&] { torch::save(linear, file); }),
      ::testing::HasSubstr("a deferred tensor has no values yet"));
  materialize(*linear);
  std::stringstream whole;
  torch::save(linear, whole);
  torch::nn::Linear loaded(3, 4);
  torch::load(loaded, whole);
  EXPECT_TRUE(at::equal(loaded->weight, linear->weight));
}

TEST_F(DeferredInitTest, LoadingAFileGivesMemory) {
  torch::nn::Linear saved(3, 4);
  for (const bool in_guard : {true, false}) {
    std::stringstream file;
    torch::save(saved, file);
    torch::nn::Linear linear{nullptr};
    {
      const DeferredInit deferred;
      linear = torch::nn::Linear(3, 4);
      if (in_guard) {
        torch::load(linear, file);
      }
    }
    if (!in_guard) {
      torch::load(linear, file);
    }
    EXPECT_EQ(num_deferred(*linear), 0);
    EXPECT_TRUE(at::equal(linear->weight, saved->weight));
    EXPECT_TRUE(linear->weight.requires_grad());
  }
}

// ---- Cost ----

TEST_F(DeferredInitTest, AHugeLayerIsBuiltWithoutMemory) {
  torch::nn::Linear huge{nullptr};
  {
    const DeferredInit deferred;
    huge = torch::nn::Linear(200000, 200000);
    huge->to(torch::kBFloat16);
  }
  EXPECT_EQ(huge->weight.numel(), 40'000'000'000);
  EXPECT_TRUE(is_deferred(huge->weight));
}

TEST_F(DeferredInitTest, ReplayPeaksBelowOneParameter) {
  static constexpr int kLayers = 8;
  static constexpr int64_t kSize = 1024;
  constexpr size_t kParamBytes = kSize * kSize * sizeof(float);
  constexpr size_t kSlackBytes = kParamBytes / 2;
  const Make make = [] {
    torch::nn::Sequential model;
    for (int i = 0; i < kLayers; ++i) {
      model->push_back(torch::nn::Linear(kSize, kSize));
    }
    for (const auto& parameter : model->parameters()) {
      torch::nn::init::normal_(parameter);
    }
    return model.ptr();
  };
  for (const bool reverse : {false, true}) {
    const MemoryMeter meter;
    const auto module = make_deferred(make);
    EXPECT_LT(meter.peak_bytes(), kSlackBytes);
    auto parameters = module->parameters();
    if (reverse) {
      std::reverse(parameters.begin(), parameters.end());
    }
    for (const auto& parameter : parameters) {
      replay(parameter);
    }
    EXPECT_GE(meter.peak_bytes(), kParamBytes);
    EXPECT_LT(meter.peak_bytes(), kParamBytes + kSlackBytes);
  }
}

TEST_F(DeferredInitTest, ReplayFreesWhatItNoLongerNeeds) {
  constexpr int64_t kNumel = 1 << 18;
  constexpr size_t kBytes = kNumel * sizeof(float);
  at::Tensor tensor;
  {
    const DeferredInit deferred;
    tensor = torch::rand({kNumel});
    for (int i = 0; i < 10; ++i) {
      tensor = tensor * 0.5;
    }
    const auto unused = torch::rand({100 * kNumel});
  }
  const MemoryMeter meter;
  replay(tensor);
  EXPECT_LT(meter.peak_bytes(), 2 * kBytes + kBytes / 2);
}

TEST_F(DeferredInitTest, ReplayIssuesExactlyTheDrawsItNeeds) {
  constexpr int kLayers = 50;
  constexpr int kDraws = 2 * kLayers; // a weight and a bias each
  const auto counter = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function)
          -> std::unique_ptr<at::ObserverContext> {
        num_draws += std::string_view(function.name()) == "aten::uniform_";
        return nullptr;
      }));
  for (const bool reverse : {false, true}) {
    const auto module = make_deferred([] {
      torch::nn::Sequential model;
      for (int i = 0; i < kLayers; ++i) {
        model->push_back(torch::nn::Linear(4, 4));
      }
      return model.ptr();
    });
    auto parameters = module->parameters();
    if (reverse) {
      std::reverse(parameters.begin(), parameters.end());
    }
    num_draws = 0;
    for (const auto& parameter : parameters) {
      replay(parameter);
    }
    // In reverse, the first one needs all before it, which are not kept.
    EXPECT_EQ(num_draws, reverse ? 2 * kDraws - 1 : kDraws);
  }
  at::Tensor twice;
  {
    const DeferredInit deferred;
    twice = torch::empty({4}).uniform_().uniform_();
  }
  num_draws = 0;
  replay(twice);
  EXPECT_EQ(num_draws, 2);
  at::removeCallback(counter);
}

// ---- What is refused ----

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
        error_of(write), HasSubstr("this would write to a tensor with memory"));
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
          HasSubstr("Make it under DeferredInit too")));
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
      HasSubstr("only these can be deferred"));
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
