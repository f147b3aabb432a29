// apply_activation_checkpointing() on modules.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/models.h"
#include "recompute/support.h"
#include "support/errors.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Module;
using torch::nn::Sequential;

/// Counts its calls, in a member that all copies share.
struct CountedImpl : Module {
  explicit CountedImpl(int64_t width)
      : linear(register_module("linear", Linear(width, width))) {}

  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return torch::tanh(linear(x));
  }

  Linear linear;
  int calls = 0;
};
TORCH_MODULE(Counted);

std::vector<std::string> names_of(const Module& module) {
  return module.named_parameters().keys();
}

std::vector<std::string> our_names_of(Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : named_parameters(module)) {
    names.push_back(name);
  }
  return names;
}

TEST(RecomputeModulesTest, ReplacesElementsOfASequential) {
  Counted first(kWidth);
  Sequential model({{"first", first}, {"act", torch::nn::ReLU()}});
  model->push_back("last", Counted(kWidth));
  const auto before = names_of(*model);
  first->eval();
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*model), 2);
  EXPECT_THAT(
      names_of(*model),
      ElementsAre(
          "first._checkpoint_wrapped_module.linear.weight",
          "first._checkpoint_wrapped_module.linear.bias",
          "last._checkpoint_wrapped_module.linear.weight",
          "last._checkpoint_wrapped_module.linear.bias"));
  EXPECT_EQ(our_names_of(*model), before);
  EXPECT_FALSE(model[0]->is_training());
  EXPECT_FALSE(first->is_training());
  EXPECT_TRUE(model[2]->is_training());

  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(first->calls, 2);
  EXPECT_TRUE(first->linear->weight.grad().defined());
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*model), 0); // done already
}

TEST(RecomputeModulesTest, ChoosesByPredicateHolderOrImpl) {
  const auto make = [] {
    return Sequential(
        Counted(kWidth), torch::nn::ReLU(), Linear(kWidth, kWidth));
  };
  auto by_class = make();
  EXPECT_EQ(
      (apply_activation_checkpointing<CountedImpl, torch::nn::ReLU>(*by_class)),
      2);
  auto by_rule = make(); // Counted has none of its own
  EXPECT_EQ(
      apply_activation_checkpointing(
          *by_rule,
          [](const Module& module) {
            return module.parameters(/*recurse=*/false).empty();
          }),
      2);
  auto none = make();
  EXPECT_EQ(apply_activation_checkpointing<Block>(*none), 0);
  auto all = Sequential(torch::nn::ReLU(), torch::nn::Tanh());
  const auto yes = [](const Module&) { return true; };
  EXPECT_EQ(apply_activation_checkpointing(*all, yes), 2);
  EXPECT_EQ(apply_activation_checkpointing(*all, yes), 0); // nor the wrappers
}

TEST(RecomputeModulesTest, TrainsAsWithout) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(11);
    Sequential model;
    for (int i = 0; i < 3; ++i) {
      model->push_back(Block(kWidth));
      model->push_back(torch::nn::Dropout(0.3));
    }
    if (call.recomputes) {
      EXPECT_EQ(
          (apply_activation_checkpointing<Block, torch::nn::Dropout>(*model)),
          6);
    }
    const auto x = leaf({2, kWidth});
    model->forward(x).square().sum().backward();
    Tensors result{x.grad()};
    for (const auto& parameter : model->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeModulesTest, OptionsReachTheWrappers) {
  const auto kept = [](bool preserve) {
    Sequential model(torch::nn::Dropout(0.5));
    apply_activation_checkpointing<torch::nn::Dropout>(
        *model, RecomputeOptions().preserve_rng_state(preserve));
    const auto x = torch::ones({1000}).requires_grad_();
    const auto y = model->forward(x);
    y.sum().backward();
    return torch::equal(x.grad(), y);
  };
  EXPECT_TRUE(kept(true));
  EXPECT_FALSE(kept(false));
}

struct WeightedSumImpl : Module {
  at::Tensor weight = register_parameter("weight", leaf({kWidth}));
  at::Tensor forward(const at::Tensor& a, at::Tensor b, double scale) {
    return (a * weight + b).tanh() * scale;
  }
};
TORCH_MODULE(WeightedSum);

TEST(RecomputeModulesTest, PassesOnSeveralArguments) {
  expect_no_difference([](Caller call) {
    Sequential model{WeightedSum(), torch::nn::ReLU()};
    if (call.recomputes) {
      EXPECT_EQ(apply_activation_checkpointing<WeightedSum>(*model), 1);
    }
    const auto a = leaf({2, kWidth});
    const auto b = leaf({2, kWidth}, 1);
    const auto y = model->forward(a, b, 0.5);
    y.sum().backward();
    return Tensors{y, a.grad(), b.grad(), model->parameters().front().grad()};
  });
}

TEST(RecomputeModulesTest, ClonesAreUnderRecomputeToo) {
  Sequential model{torch::nn::Dropout(0.5), Linear(kWidth, kWidth)};
  apply_activation_checkpointing<Linear>(*model);
  const auto copy =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  EXPECT_EQ(names_of(*copy), names_of(*model));
  EXPECT_FALSE(copy->parameters()[0].is_same(model->parameters()[0]));
  copy->forward(noise({2, kWidth})).sum().backward();
  EXPECT_TRUE(copy->parameters()[0].grad().defined());
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

TEST(RecomputeModulesTest, ASharedElementHasOneWrapper) {
  Counted shared(kWidth);
  Sequential model{shared, torch::nn::ReLU(), shared};
  Module owner;
  owner.register_module("again", Sequential(shared));
  owner.register_module("model", model);
  EXPECT_EQ(apply_activation_checkpointing<Counted>(owner), 1);
  EXPECT_EQ(model[0], model[2]);
  EXPECT_EQ(owner.children()[0]->children()[0], model[0]);
  EXPECT_EQ(model->children()[2], model[2]);
  EXPECT_NE(model[0], shared.ptr());
  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(shared->calls, 4);
}

struct OuterImpl : Module {
  Sequential inner =
      register_module("inner", Sequential(Counted(kWidth), Counted(kWidth)));
  at::Tensor forward(const at::Tensor& x) {
    return inner->forward(x);
  }
};
TORCH_MODULE(Outer);

TEST(RecomputeModulesTest, WrapsInsideOfWhatItWraps) {
  Outer outer;
  Sequential model(outer);
  EXPECT_EQ((apply_activation_checkpointing<Outer, Counted>(*model)), 3);
  EXPECT_EQ(
      names_of(*model).front(),
      "0._checkpoint_wrapped_module.inner.0._checkpoint_wrapped_module.linear.weight");
  EXPECT_EQ(our_names_of(*model).front(), "0.inner.0.linear.weight");
  const Counted counted(std::dynamic_pointer_cast<CountedImpl>(
      outer->inner[0]->children().front()));
  model->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(counted->calls, 3); // in forward, and for each of the two
}

TEST(RecomputeModulesTest, ASequentialThatIsAMemberIsRecomputedAsAWhole) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(12);
    Outer outer;
    const auto before = names_of(*outer);
    const Counted counted(
        std::dynamic_pointer_cast<CountedImpl>(outer->inner->ptr(1)));
    outer->inner->eval();
    if (call.recomputes) {
      EXPECT_EQ(apply_activation_checkpointing<Sequential>(*outer), 1);
      EXPECT_EQ(apply_activation_checkpointing<Sequential>(*outer), 0);
      EXPECT_THAT(
          names_of(*outer).front(), HasSubstr("_checkpoint_wrapped_module"));
      EXPECT_EQ(our_names_of(*outer), before);
      EXPECT_FALSE(outer->inner->ptr(0)->is_training());
    }
    const auto x = leaf({2, kWidth});
    outer->forward(x).square().sum().backward();
    EXPECT_EQ(counted->calls, call.recomputes ? 2 : 1);
    Tensors result{x.grad()};
    for (const auto& parameter : outer->parameters()) {
      result.push_back(parameter.grad());
    }
    return result;
  });
}

TEST(RecomputeModulesTest, WrapsInsideOfAWholeSequential) {
  Outer outer;
  const Counted first(
      std::dynamic_pointer_cast<CountedImpl>(outer->inner->ptr(0)));
  EXPECT_EQ((apply_activation_checkpointing<Sequential, Counted>(*outer)), 3);
  EXPECT_EQ(our_names_of(*outer).front(), "inner.0.linear.weight");
  outer->forward(noise({2, kWidth})).sum().backward();
  EXPECT_EQ(first->calls, 3); // in forward, and for each of the two

  Outer later;
  EXPECT_EQ(apply_activation_checkpointing<Sequential>(*later), 1);
  EXPECT_EQ(apply_activation_checkpointing<Counted>(*later), 2);
  EXPECT_EQ(our_names_of(*later), our_names_of(*outer));
}

TEST(RecomputeModulesTest, AWholeSequentialTakesSeveralArguments) {
  struct Owner : Module {
    Sequential inner =
        register_module("inner", Sequential(WeightedSum(), torch::nn::ReLU()));
  };
  Owner owner;
  const auto a = leaf({2, kWidth});
  const auto b = leaf({2, kWidth}, 1);
  const auto expected = owner.inner->forward(a, b, 0.5);
  EXPECT_EQ(apply_activation_checkpointing<Sequential>(owner), 1);
  const auto actual = owner.inner->forward(a, b, 0.5);
  EXPECT_TRUE(torch::equal(actual, expected));
  actual.sum().backward();
  EXPECT_TRUE(b.grad().defined());
}

TEST(RecomputeModulesTest, AWholeSequentialRefusesWhatItCannotKeep) {
  Outer outer;
  apply_activation_checkpointing<Sequential>(*outer);
  EXPECT_THAT(
      error_of([&] { outer->inner->clone(); }),
      HasSubstr("Clone the model first"));

  Outer with_more;
  with_more->inner->register_parameter("scale", leaf({1}));
  const auto before = names_of(*with_more);
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Sequential>(*with_more); }),
      AllOf(
          HasSubstr("submodule \"inner\""), HasSubstr("beside its elements")));
  EXPECT_EQ(names_of(*with_more), before);
}

TEST(RecomputeModulesTest, RejectsWhatIsNotInASequential) {
  Stack model(kVocabulary, kWidth, 2);
  auto front = Sequential(Block(kWidth));
  model->register_module("front", front); // could be replaced
  const auto before = names_of(*model);
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Block>(*model); }),
      AllOf(
          HasSubstr("[apply_activation_checkpointing] submodule \"blocks.0\""),
          HasSubstr("BlockImpl) is not an element of a torch::nn::Sequential"),
          HasSubstr("Call tessera::recompute in the forward of")));
  EXPECT_EQ(names_of(*model), before);
  EXPECT_EQ(front[0]->as<Block>(), front->children()[0]->as<Block>());
  EXPECT_NE(front[0]->as<Block>(), nullptr);

  front->register_module(
      "beside", Block(kWidth)); // a child, but not an element
  EXPECT_THAT(
      error_of([&] { apply_activation_checkpointing<Block>(*front); }),
      HasSubstr("submodule \"beside\""));
  EXPECT_NE(front[0]->as<Block>(), nullptr);
}

TEST(RecomputeModulesTest, RejectsAModuleThatReturnsNoTensor) {
  Sequential model(torch::nn::LSTM(kWidth, kWidth));
  EXPECT_EQ(apply_activation_checkpointing<torch::nn::LSTM>(*model), 1);
  EXPECT_THAT(
      error_of([&] {
        model->forward(noise({3, 1, kWidth}));
      }),
      AllOf(
          HasSubstr("LSTMImpl returns std::tuple"),
          HasSubstr("only modules that return a tensor")));
}

} // namespace
} // namespace tessera
