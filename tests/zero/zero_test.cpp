// Beyond PyTorch's own tests, which are in tests/parity.
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/byte_vector.h"
#include "support/errors.h"
#include "support/memory_meter.h"
#include "support/ranks.h"
#include "support/warnings.h"
#include "zero/support.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

torch::nn::Sequential make_zero_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(
      torch::nn::Linear(7, 13), torch::nn::ReLU(), torch::nn::Linear(13, 3));
}

/// The same on every rank, so that gradients need no averaging.
void backward(torch::nn::Sequential& model, int step) {
  torch::manual_seed(100 + step);
  model->forward(torch::randn({4, 7})).square().mean().backward();
}

/// Expects the same bits with and without sharding.
template <class O, class Options>
void expect_matches_plain(const Options& options, bool bucket_view = false) {
  auto sharded = make_zero_model();
  auto plain = make_zero_model();
  ZeroRedundancyOptimizer zero(
      sharded->parameters(),
      optimizer_class<O>(options),
      ZeroOptions().parameters_as_bucket_view(bucket_view));
  O optimizer(plain->parameters(), options);
  for (int step = 0; step < 4; ++step) {
    zero.zero_grad();
    optimizer.zero_grad();
    backward(sharded, step);
    backward(plain, step);
    zero.step();
    optimizer.step();
    expect_equal(sharded, plain);
  }
  zero.consolidate_state_dict();
  if (zero.join_process_group().rank() == 0) {
    EXPECT_EQ(
        diff_state_dicts(zero.state_dict(), optim::state_dict(optimizer)), "");
  }
}

TEST(ZeroTest, EveryKindOfOptimizerMatchesSingleProcess) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const Group&) {
      for (const bool bucket_view : {false, true}) {
        expect_matches_plain<optim::AdamW>(
            optim::AdamWOptions(1e-2).amsgrad(true), bucket_view);
        expect_matches_plain<optim::SGD>(
            optim::SGDOptions(1e-2).momentum(0.9), bucket_view);
        expect_matches_plain<torch::optim::Adam>(
            torch::optim::AdamOptions(1e-2), bucket_view);
        expect_matches_plain<torch::optim::Adagrad>(
            torch::optim::AdagradOptions(1e-2), bucket_view);
      }
    });
  }
}

TEST(ZeroTest, OverGlooMatchesSingleProcess) {
  on_ranks({.size = 3, .backend = "gloo"}, [](const Group&) {
    for (const bool bucket_view : {false, true}) {
      expect_matches_plain<optim::AdamW>(
          optim::AdamWOptions(1e-2), bucket_view);
    }
  });
}

TEST(ZeroTest, StridesOfParametersAreKept) {
  on_ranks(2, [](const Group&) {
    for (const bool bucket_view : {false, true}) {
      torch::manual_seed(0);
      torch::nn::Conv2d conv(3, 4, 3);
      conv->weight.set_data(
          conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      const at::Tensor other =
          torch::rand({4, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
      other.requires_grad_(true);
      const at::Tensor before = conv->weight.detach().clone();
      ZeroRedundancyOptimizer zero(
          {conv->weight, other},
          optimizer_class<optim::SGD>(0.5),
          ZeroOptions().parameters_as_bucket_view(bucket_view));
      (conv->weight.sum() + other.sum()).backward();
      zero.step();
      EXPECT_TRUE(conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
      EXPECT_TRUE(torch::equal(conv->weight, before - 0.5));
    }
  });
}

TEST(ZeroTest, FrozenParametersLeaveTheirBucket) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    auto plain = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(),
        optimizer_class<optim::AdamW>(1e-2),
        ZeroOptions().parameters_as_bucket_view(true));
    optim::AdamW optimizer(plain->parameters(), 1e-2);
    for (int step = 0; step < 6; ++step) {
      for (auto* each : {&model, &plain}) {
        (*each)->zero_grad();
        (*each)->parameters()[step % 4].requires_grad_(step % 2 == 0);
        backward(*each, step);
      }
      zero.step();
      optimizer.step();
      expect_equal(model, plain);
    }
  });
}

TEST(ZeroTest, ReferencesToOptionsStayValid) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    auto& options = zero.param_groups()[0].options();
    backward(model, 0);
    zero.step();
    options.set_lr(0.25);
    zero.step();
    EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.25);
    EXPECT_EQ(zero.optim().param_groups()[0].options().get_lr(), 0.25);
  });
}

TEST(ZeroTest, AnOldGraphIsNotRunBackward) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    backward(model, 0);
    const at::Tensor old =
        model->forward(torch::ones({1, 7}).requires_grad_(true)).sum();
    zero.step();
    EXPECT_THAT(
        error_of([&] { old.backward(); }),
        HasSubstr("modified by an inplace operation"));
  });
}

TEST(ZeroTest, RejectsModelsThatDiffer) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model(2 + world.rank(), 2);
    EXPECT_THROW(
        ZeroRedundancyOptimizer(
            model->parameters(), optimizer_class<optim::SGD>(0.1)),
        DisagreementError);
  });
}

/// Each rank sends the parameters that it steps: one model of parts of several.
TEST(ZeroTest, WarnsOfValuesThatDifferAtTheFirstStep) {
  on_ranks(2, [](const Group& world) {
    for (const bool differ : {false, true}) {
      auto model = make_zero_model();
      ZeroRedundancyOptimizer zero(
          model->parameters(), optimizer_class<optim::AdamW>(1e-2));
      if (differ) {
        const torch::NoGradGuard no_grad;
        model->parameters()[2][1][1].add_(world.rank());
      }
      backward(model, 0);
      const Warnings warnings;
      zero.step();
      zero.step();
      if (differ && world.rank() == 0) {
        EXPECT_THAT(
            warnings.texts,
            ::testing::ElementsAre(HasSubstr("different parameters")));
      } else {
        EXPECT_THAT(warnings.texts, ::testing::IsEmpty());
      }
    }
  });
}

TEST(ZeroTest, RejectsLbfgsOnSeveralRanks) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    EXPECT_THAT(
        error_of([&] {
          ZeroRedundancyOptimizer(
              model->parameters(), optimizer_class<torch::optim::LBFGS>(1.0));
        }),
        HasSubstr("dot products over all parameters"));
  });
}

TEST(ZeroTest, RejectsOnEveryRankWhatOneRankSees) {
  on_ranks(2, [](const Group& world) {
    auto model = make_zero_model();
    std::vector<at::Tensor> params = model->parameters();
    if (world.rank() == 1) {
      params.push_back(params[0]);
    }
    EXPECT_THAT(
        error_of([&] {
          ZeroRedundancyOptimizer(params, optimizer_class<optim::SGD>(0.1));
        }),
        HasSubstr("was given before"));
  });
}

TEST(ZeroTest, RejectsShards) {
  on_ranks(2, [](const Group&) {
    torch::nn::Linear model(4, 4);
    fully_shard(*model);
    EXPECT_THAT(
        error_of([&] {
          ZeroRedundancyOptimizer(
              parameters(*model), optimizer_class<optim::SGD>(0.1));
        }),
        HasSubstr("sharded by FSDP"));
  });
}

TEST(ZeroTest, RejectsGroupsThatLibTorchAdded) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    static_cast<torch::optim::Optimizer&>(zero).add_param_group(
        OptimizerParamGroup({torch::rand(2)}));
    EXPECT_THAT(
        error_of([&] { zero.step(); }),
        HasSubstr("parameter 0 of group 1 ([2]) was added through"));
  });
}

TEST(ZeroTest, RejectsParametersThatLeftTheirGroup) {
  on_ranks(2, [](const Group&) {
    const auto make = [](const std::vector<at::Tensor>& params) {
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>{params[0], params[1]});
      groups.emplace_back(std::vector<at::Tensor>{params[2]});
      return std::make_unique<ZeroRedundancyOptimizer>(
          groups, optimizer_class<optim::SGD>(0.1));
    };
    std::vector<at::Tensor> params;
    for (int64_t i = 1; i < 4; ++i) {
      params.push_back(torch::ones({i}).set_requires_grad(true));
      params.back().mutable_grad() = torch::ones({i});
    }
    const auto expect_refused = [&](ZeroRedundancyOptimizer& zero,
                                    const std::string& text) {
      const std::string error = error_of([&] { zero.step(); });
      EXPECT_THAT(error, HasSubstr(text));
      EXPECT_THAT(error, Not(HasSubstr("added through")));
      for (const at::Tensor& param : params) {
        EXPECT_TRUE(torch::equal(param, torch::ones_like(param)));
      }
    };
    { // moved: another group's options would be meant
      const auto zero = make(params);
      auto& groups = zero->param_groups();
      groups[1].params().push_back(groups[0].params()[1]);
      groups[0].params().pop_back();
      expect_refused(
          *zero, "parameter 1 of group 1 ([2]) was parameter 1 of group 0");
    }
    { // taken out
      const auto zero = make(params);
      zero->param_groups()[1].params().clear();
      expect_refused(
          *zero, "group 1 was added with 1 parameters and has 0 now");
    }
    { // the group too
      const auto zero = make(params);
      zero->param_groups().pop_back();
      expect_refused(
          *zero, "group 1 was added with 1 parameters and has 0 now");
    }
    make(params)->step();
    EXPECT_FALSE(torch::equal(params[0], torch::ones({1})));
  });
}

TEST(ZeroTest, AStepThatThrowsOnOneRankThrowsOnAll) {
  on_ranks(3, [](const Group& world) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    const auto closure = [&]() -> at::Tensor {
      if (world.rank() == 1) {
        throw std::runtime_error("a bad batch");
      }
      return torch::zeros({});
    };
    EXPECT_THAT(
        error_of([&] { zero.step(closure); }), HasSubstr("a bad batch"));
    backward(model, 0);
    zero.step(); // goes on
  });
}

TEST(ZeroTest, ARankThatStopsEarlyIsNamed) {
  on_ranks(
      {.size = 2, .timeout = std::chrono::seconds(8)}, [](const Group& world) {
        const Group group = world.split(0).value(); // dead afterwards
        auto model = make_zero_model();
        ZeroRedundancyOptimizer zero(
            model->parameters(),
            optimizer_class<optim::SGD>(0.1),
            ZeroOptions().process_group(group));
        zero.step();
        if (world.rank() == 0) {
          EXPECT_THAT(error_of([&] { zero.step(); }), HasSubstr("rank 1"));
        } else {
          std::this_thread::sleep_for(std::chrono::seconds(9));
        }
      });
}

TEST(ZeroTest, StateMovesBetweenPartitions) {
  on_ranks(4, [](const Group& world) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::AdamW>(1e-2));
    backward(model, 0);
    zero.step();
    zero.consolidate_state_dict(2);
    Bytes bytes;
    if (world.rank() == 2) {
      bytes = state_dict_to_bytes(zero.state_dict());
    } else {
      EXPECT_THAT(
          error_of([&] { zero.state_dict(); }),
          HasSubstr("has not been consolidated on this rank"));
    }
    const StateDict saved =
        state_dict_from_bytes(world.broadcast_bytes(bytes, 2));
    const StateDict copy = saved.clone();

    // Into two halves, each of two ranks, and into one.
    const auto half = world.split(world.rank() % 2);
    ZeroRedundancyOptimizer halved(
        model->parameters(),
        optimizer_class<torch::optim::AdamW>(0.5),
        ZeroOptions().process_group(*half));
    halved.load_state_dict(saved);
    halved.consolidate_state_dict(1);
    if (half->rank() == 1) {
      EXPECT_EQ(
          diff_state_dicts(
              halved.state_dict().at("state").dict(), saved.at("state").dict()),
          "");
    }
    EXPECT_EQ(halved.param_groups()[0].options().get_lr(), 1e-2);
    optim::AdamW plain(model->parameters(), 0.5);
    plain.load_state_dict(saved);
    EXPECT_EQ(diff_state_dicts(plain.state_dict(), saved), "");
    EXPECT_EQ(saved, copy);
  });
}

TEST(ZeroTest, GetStateDictCollectsWhatOtherRanksKeep) {
  on_ranks(3, [](const Group& world) {
    auto model = make_zero_model();
    auto plain = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::AdamW>(1e-2));
    optim::AdamW optimizer(plain->parameters(), 1e-2);
    backward(model, 0);
    backward(plain, 0);
    zero.step();
    optimizer.step();
    const auto full = StateDictOptions().full_state_dict(true);
    const StateDict expected = get_optimizer_state_dict(*plain, {optimizer});
    const auto all_of = [&](ZeroRedundancyOptimizer& of) {
      return get_optimizer_state_dict(*model, {of}, full);
    };
    EXPECT_EQ(diff_state_dicts(all_of(zero), expected), "");
    const StateDict on_rank0 = get_optimizer_state_dict(
        *model,
        {zero},
        StateDictOptions().full_state_dict(true).cpu_offload(true));
    EXPECT_EQ(on_rank0.empty(), world.rank() != 0);
    EXPECT_THROW(zero.state_dict(), c10::Error); // was not asked to keep it

    // What does not fit leaves everything as it was.
    StateDict wrong = expected.clone();
    wrong.at("state").dict().at("0.bias").dict().set(
        "exp_avg", torch::zeros({2}));
    EXPECT_THROW(set_optimizer_state_dict(*model, {zero}, wrong), c10::Error);
    EXPECT_EQ(diff_state_dicts(all_of(zero), expected), "");
    ZeroRedundancyOptimizer other(
        model->parameters(), optimizer_class<optim::AdamW>(0.5));
    set_optimizer_state_dict(*model, {other}, expected);
    EXPECT_EQ(diff_state_dicts(all_of(other), expected), "");
  });
}

/// All tensors of a dictionary whole. Collective.
StateDict whole(const StateDict& dict) {
  FlatState flat = flatten_state_dict(dict);
  for (auto& leaf : flat.leaves) {
    if (leaf.value.is_sharded()) {
      leaf.value = leaf.value.sharded().full_tensor();
    }
  }
  return unflatten_state_dict(flat);
}

TEST(ZeroTest, GetStateDictLeavesStateWithItsOwner) {
  on_ranks(3, [](const Group& world) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::AdamW>(1e-2));
    backward(model, 0);
    zero.step();
    zero.consolidate_state_dict(0);
    const StateDict expected = get_optimizer_state_dict(
        *model, {zero}, StateDictOptions().full_state_dict(true));
    const StateDict state = get_optimizer_state_dict(*model, {zero});
    int64_t elements = 0;
    for (const auto& leaf : flatten_state_dict(state).leaves) {
      if (leaf.value.is_sharded()) {
        elements += leaf.value.sharded().local_numel();
      }
    }
    int64_t owned = 0;
    for (const at::Tensor& param : zero.optim().param_groups()[0].params()) {
      owned += param.numel();
    }
    EXPECT_EQ(elements, 2 * owned);
    EXPECT_EQ(diff_state_dicts(whole(state), expected), "");

    // Into an optimizer whose owners are the same, without moving anything;
    // into one with others; into one that is not sharded.
    ZeroRedundancyOptimizer same(
        model->parameters(), optimizer_class<optim::AdamW>(0.5));
    set_optimizer_state_dict(*model, {same}, state);
    const auto full = StateDictOptions().full_state_dict(true);
    EXPECT_EQ(
        diff_state_dicts(
            get_optimizer_state_dict(*model, {same}, full), expected),
        "");
    auto params = model->parameters();
    ZeroRedundancyOptimizer one(
        {OptimizerParamGroup({params[0]})}, optimizer_class<optim::AdamW>(0.5));
    for (const size_t i : {3, 2, 1}) { // in another order, to other owners
      one.add_param_group(OptimizerParamGroup({params[i]}));
    }
    set_optimizer_state_dict(*model, {one}, state);
    EXPECT_EQ(
        diff_state_dicts(
            get_optimizer_state_dict(*model, {one}, full).at("state").dict(),
            expected.at("state").dict()),
        "");
    optim::AdamW plain(model->parameters(), 0.5);
    set_optimizer_state_dict(*model, {plain}, state);
    EXPECT_EQ(
        diff_state_dicts(get_optimizer_state_dict(*model, {plain}), expected),
        "");
    world.barrier();
  });
}

TEST(ZeroTest, SavingAndLoadingPeakBelowThisRanksShare) {
  on_ranks(4, [](const Group& world) {
    constexpr double kMegaByte = 1 << 20;
    SteppedZero subject(4);
    auto& [model, zero] = subject;
    // The state is 32 MB; each rank keeps 8 MB.
    MemoryMeter meter;
    StateDict state = get_optimizer_state_dict(*model, {zero});
    EXPECT_LE(static_cast<double>(meter.peak_bytes()), 1 * kMegaByte);
    set_optimizer_state_dict(*model, {zero}, state);
    EXPECT_LE(static_cast<double>(meter.peak_bytes()), 17 * kMegaByte);
    // Full tensors; each rank needs a part of them.
    const StateDict all = get_optimizer_state_dict(
        *model, {zero}, StateDictOptions().full_state_dict(true));
    state = {};
    const auto before = static_cast<double>(meter.live_bytes());
    meter.reset_peak();
    set_optimizer_state_dict(*model, {zero}, all);
    EXPECT_LE(static_cast<double>(meter.peak_bytes()) - before, 17 * kMegaByte);
    world.barrier();
  });
}

TEST(ZeroTest, RejectsARankThatIsNotThere) {
  on_ranks(2, [](const Group& world) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    // On one rank only: the other rank throws, too.
    EXPECT_THAT(
        error_of([&] { zero.consolidate_state_dict(2 * world.rank()); }),
        HasSubstr("there is no rank 2"));
  });
}

TEST(ZeroTest, LoadingRejectsWhatFitsAnotherRanksParameterNot) {
  on_ranks(2, [](const Group&) {
    auto model = make_zero_model();
    ZeroRedundancyOptimizer zero(
        model->parameters(),
        optimizer_class<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)));
    optim::SGD plain(model->parameters(), optim::SGDOptions(0.3).momentum(0.9));
    backward(model, 0);
    plain.step();
    StateDict saved = plain.state_dict();
    saved.at("state").dict().at(0).dict().set(
        "momentum_buffer", torch::zeros({2, 2}));
    EXPECT_THAT(
        error_of([&] { zero.load_state_dict(saved); }),
        AllOf(HasSubstr("parameter \"0\""), HasSubstr("momentum_buffer")));
    EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.1);
    saved.at("state").dict().erase(0);
    saved.at("state").dict().set(9, StateDict());
    EXPECT_THAT(
        error_of([&] { zero.load_state_dict(saved); }),
        HasSubstr("no param group has it"));
    EXPECT_THAT(
        error_of([&] {
          zero.load_state_dict({{"state", StateDict()}});
        }),
        HasSubstr("no \"param_groups\""));
  });
}

/// Four layers of 1 M elements and AdamW: 32 MB of state.
void expect_consolidation_peaks_below(double mega_bytes_beside) {
  constexpr double kMegaByte = 1 << 20;
  constexpr double kResult = 32 * kMegaByte;
  constexpr double kSlack = 1 * kMegaByte;
  SteppedZero subject(4);
  auto& zero = subject.zero;
  MemoryMeter meter;
  zero.consolidate_state_dict(1);
  const bool has_it = zero.join_process_group().rank() == 1;
  EXPECT_LE(
      static_cast<double>(meter.peak_bytes()),
      (has_it ? kResult : 0) + mega_bytes_beside * kMegaByte + kSlack);
  // Gloo's own thread releases what it sent a moment later.
  const double kept = (has_it ? kResult : 0) + kSlack;
  for (int i = 0; i < 3000 && meter.live_bytes() > kept; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_LE(static_cast<double>(meter.live_bytes()), kept);
}

TEST(ZeroTest, ConsolidationPeaksBelowTheResult) {
  on_ranks(2, [](const Group&) { expect_consolidation_peaks_below(0); });
}

TEST(ZeroTest, ConsolidationOverGlooPeaksBelowTheResultAndABucket) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group&) {
    expect_consolidation_peaks_below(32);
  });
}

TEST(ZeroJoinTest, ARankWithoutInputsGoesOnStepping) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(0);
    torch::nn::Linear model(3, 3);
    auto plain = torch::nn::Linear(3, 3);
    {
      const torch::NoGradGuard no_grad;
      plain->weight.copy_(model->weight);
      plain->bias.copy_(model->bias);
    }
    ZeroRedundancyOptimizer zero(
        model->parameters(), optimizer_class<optim::SGD>(0.1));
    optim::SGD optimizer(plain->parameters(), 0.1);
    for (auto each : {model, plain}) {
      each->forward(torch::ones({1, 3})).sum().backward();
    }
    Join::run({&zero}, [&] {
      for (int i = 0; i < 2 + 3 * world.rank(); ++i) {
        zero.step();
      }
    });
    for (int i = 0; i < 5; ++i) {
      optimizer.step();
    }
    EXPECT_TRUE(torch::equal(model->weight, plain->weight));
    EXPECT_TRUE(torch::equal(model->bias, plain->bias));
  });
}

} // namespace
} // namespace tessera
