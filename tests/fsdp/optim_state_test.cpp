// State dicts of optimizers alone: what is missing, and what does not fit.
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>

#include "fsdp/state_net.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OptimStateTest, AnOptimizersOwnLoadRefusesWhatDoesNotFit) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::ShardDim0);
    auto optim = train(*net);
    const StateDict saved = get_optimizer_state_dict(*net, {optim}).clone();

    auto flat = make(How::ShardFlat);
    auto other = train(*flat);
    const StateDict before = optim::state_dict(other).clone();
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(other, saved); }),
        AllOf(HasSubstr("cut in another way"), HasSubstr("exp_avg")));
    EXPECT_EQ(diff_state_dicts(optim::state_dict(other), before), "");

    auto reversed = parameters(*net);
    std::reverse(reversed.begin(), reversed.end());
    optim::Adam backwards(reversed, 0.01);
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(backwards, saved); }),
        HasSubstr(
            "has the name \"scale\" where this optimizer has \"b.bias\""));
    EXPECT_TRUE(optim::state_dict(backwards).at("state").dict().empty());

    StateNet plain;
    optim::Adam of_plain(plain.parameters(), 0.01);
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(of_plain, saved); }),
        HasSubstr("does not step a shard of one parameter"));
  });
}

TEST(OptimStateTest, MissingOptimizerStateIsNamedUnlessToldOtherwise) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    auto optim = train(*net);
    StateDict osd = get_optimizer_state_dict(*net, {optim}, kFull).clone();
    osd.at("state").dict().erase("a.weight");
    osd.at("state").dict().erase("b.bias");
    const std::string error =
        error_of([&] { set_optimizer_state_dict(*net, {optim}, osd, kFull); });
    EXPECT_THAT(error, HasSubstr("missing \"state.a.weight\""));
    EXPECT_THAT(error, HasSubstr("missing \"state.b.bias\""));
    auto lenient = kFull;
    set_optimizer_state_dict(*net, {optim}, osd, lenient.strict(false));
    EXPECT_EQ(
        get_optimizer_state_dict(*net, {optim}, kFull)
            .at("state")
            .dict()
            .size(),
        3u);
  });
}

/// One step more, of this rank alone.
void step_alone(
    torch::optim::Optimizer& optim,
    const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    param.mutable_grad() = torch::zeros(param.sizes());
  }
  optim.step();
  optim.zero_grad();
}

TEST(OptimStateTest, StateThatDiffersBetweenRanksIsNamedOnAllOfThem) {
  on_ranks(2, [](const Group& world) {
    for (const How how : {How::ShardDim0, How::ShardFlat}) {
      auto net = make(how);
      auto optim = train(*net);
      if (world.rank() == 1) {
        step_alone(optim, parameters(*net));
      }
      EXPECT_THAT(
          error_of([&] { get_optimizer_state_dict(*net, {optim}); }),
          AllOf(
              HasSubstr("ranks 0 and 1 have different state"),
              HasSubstr("step")));
    }
  });
}

TEST(OptimStateTest, StateThatARankLacksIsNamedOnAllOfThem) {
  on_ranks(2, [](const Group& world) {
    auto net = make(How::ShardDim0);
    auto params = parameters(*net);
    optim::Adam optim(params, 0.01);
    if (world.rank() == 1) {
      params.erase(params.begin());
    }
    step_alone(optim, params);
    EXPECT_THAT(
        error_of([&] { get_optimizer_state_dict(*net, {optim}); }),
        AllOf(
            HasSubstr("\"scale\""),
            HasSubstr("only ranks 0 have state for it")));
  });
}

/// A rank without elements has no state; that must not make it initialize.
TEST(OptimStateTest, StateOnSomeRanksOnlyIsLeftAlone) {
  on_ranks(2, [](const Group&) {
    struct Two : torch::nn::Module {
      at::Tensor one = register_parameter("one", torch::ones({1, 3}));
      at::Tensor two = register_parameter("two", torch::ones({4, 3}));
    };
    auto net = std::make_shared<Two>();
    fully_shard(*net, FullyShardOptions().layout(ShardLayout::Dim0));
    optim::Adam optim(parameters(*net), 0.1);
    net->one.sum().backward();
    optim.step();
    optim.zero_grad();
    const StateDict osd = get_optimizer_state_dict(*net, {optim}, kFull);
    EXPECT_EQ(osd.at("state").dict().keys(), (std::vector<StateKey>{"one"}));
  });
}

TEST(OptimStateTest, ANamedOptimizerLoadsByItsNames) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    const auto named = [](StateNet& model) {
      return optim::NamedOptimizer(
          named_parameters(model),
          std::make_unique<optim::Adam>(parameters(model), 0.01));
    };
    auto optim = named(*net);
    net->forward(torch::ones({4, 5})).sum().backward();
    optim.step();
    const auto state = get_state_dict(*net, {optim});
    auto other = make(How::Orig);
    auto other_optim = named(*other);
    set_state_dict(*other, {other_optim}, state);
    EXPECT_EQ(
        diff_state_dicts(
            optim::state_dict(other_optim), optim::state_dict(optim)),
        "");
  });
}

} // namespace
} // namespace tessera
