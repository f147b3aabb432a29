// One scaler on several ranks.
#include <tessera/train/grad_scaler.h>
#include <tessera/train/training_state.h>
#include <tessera/zero/ddp_zero_hook.h>

#include <cmath>
#include <tuple>

#include "checkpoint/support.h"
#include "comm/diagnostics/observer.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "train/front_ends.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor leaf() {
  return torch::ones({3}).requires_grad_();
}

/// Front end and number of ranks.
class ScalerRanksTest
    : public ::testing::TestWithParam<std::tuple<FrontEnd, int>> {};

/// An overflow on one rank, then a step without one.
template <class O>
void expect_ranks_agree(FrontEnd kind, const Group& world, bool clips) {
  SCOPED_TRACE(clips ? "with clipping" : "without clipping");
  Trained<O> trained(kind);
  Trained<O> expected(kind);
  GradScaler scaler(GradScalerOptions().init_scale(1024));
  const auto backward = [&](Trained<O>& run, int step, double scale) {
    run.optimizer->zero_grad();
    (loss_of(run.model, tokens(world.rank(), step)) * scale).backward();
  };
  for (int step = 0; step < 4; ++step) {
    backward(trained, step, scaler.scale(torch::ones({})).item<double>());
    const bool overflows = step == 1 || step == 2;
    if (overflows && world.rank() == world.size() - 1) {
      trained.spoil_gradient();
    }
    const auto before = trained.snapshot();
    if (clips) {
      scaler.unscale_(*trained.optimizer);
      const at::Tensor clipped = scaler.clip_grad_norm_(trained.model, 0.1);
      const auto norm = clipped.item<double>();
      EXPECT_TRUE(!overflows || !std::isfinite(norm) || trained.ddp != nullptr);
    }
    scaler.step(*trained.optimizer);
    scaler.update();
    EXPECT_EQ(all_equal(trained.snapshot(), before), overflows) << step;
    EXPECT_EQ(scaler.skipped(), overflows);
    if (!overflows) {
      backward(expected, step, 1);
      if (clips) {
        clip_grad_norm_(expected.model, 0.1);
      }
      expected.optimizer->step();
    }
  }
  EXPECT_EQ(scaler.get_scale(), 256);
  EXPECT_EQ(scaler.state_dict().at("_growth_tracker").to_int(), 1);
  // The scale is a power of two.
  EXPECT_TRUE(all_equal(trained.snapshot(), expected.snapshot()));
  trained.optimizer->zero_grad();
  expected.optimizer->zero_grad();
  EXPECT_EQ(
      diff_state_dicts(
          get_optimizer_state_dict(trained.model, {*trained.optimizer}),
          get_optimizer_state_dict(expected.model, {*expected.optimizer})),
      "");
}

TEST_P(ScalerRanksTest, NoRankStepsIfOneOverflows) {
  const auto [kind, size] = GetParam();
  on_ranks(size, [kind = kind](const Group& world) {
    for (const bool clips : {false, true}) {
      expect_ranks_agree<optim::AdamW>(kind, world, clips);
      expect_ranks_agree<torch::optim::SGD>(kind, world, clips);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ScalerRanksTest,
    ::testing::Combine(
        ::testing::Values(
            FrontEnd::Flat,
            FrontEnd::Dim0,
            FrontEnd::Ddp,
            FrontEnd::Zero),
        ::testing::Values(2, 4)),
    [](const auto& test) {
      return name_of(std::get<0>(test.param)) + "On" +
          std::to_string(std::get<1>(test.param));
    });

/// Collectives of the scaler that begin while it lives.
class ScalerCalls {
 public:
  int count() const {
    return count_;
  }

 private:
  int count_ = 0;
  comm::CallWatch watch_{[this](const comm::CallEvent& event) {
    count_ += event.kind == comm::CallEvent::Kind::Starts &&
        comm::subject_of(event.call) == "GradScaler: found_inf";
  }};
};

TEST(ScalerOnRanksTest, IssuesExactlyOneReductionForAllOptimizers) {
  on_ranks(2, [](const Group& world) {
    const auto good = leaf();
    const auto bad = leaf();
    optim::SGD first({good}, 0.5);
    optim::AdamW second({bad}, 0.5);
    GradScaler scaler(GradScalerOptions().init_scale(4));
    ScalerCalls calls;
    scaler.scale(torch::ones({}));
    good.mutable_grad() = torch::full({3}, 4.0f);
    bad.mutable_grad() = torch::full({3}, 4.0f);
    if (world.rank() == 1) {
      bad.mutable_grad()[2] = std::nan("");
    }
    scaler.unscale_(first);
    scaler.unscale_(second);
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    EXPECT_EQ(calls.count(), 1);
    // Each optimizer has its own gradients, as in Python.
    EXPECT_TRUE(torch::equal(good.detach(), torch::full({3}, 0.5f)));
    EXPECT_TRUE(torch::equal(bad.detach(), torch::ones({3})));
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

TEST(ScalerOnRanksTest, IssuesNoReductionIfTheNormSaysIt) {
  on_ranks(2, [](const Group& world) {
    for (const auto& [kind, count] :
         {std::pair(FrontEnd::Flat, 0), std::pair(FrontEnd::Ddp, 1)}) {
      Trained<> trained(kind);
      GradScaler scaler;
      loss_of(trained.model, tokens(world.rank(), 0)).backward();
      scaler.scale(torch::ones({}));
      ScalerCalls calls;
      scaler.unscale_(*trained.optimizer);
      scaler.clip_grad_norm_(trained.model, 1.0);
      scaler.step(*trained.optimizer);
      scaler.update();
      EXPECT_EQ(calls.count(), count) << kind;
    }
  });
}

/// Gradients that one rank mended after they were unscaled: all ranks do what
/// the norm says, which all of them know.
TEST(ScalerOnRanksTest, AllRanksStepIfTheNormIsFinite) {
  on_ranks(2, [](const Group& world) {
    Trained<> trained(FrontEnd::Flat);
    GradScaler scaler(GradScalerOptions().init_scale(4));
    scaler.scale(loss_of(trained.model, tokens(world.rank(), 0))).backward();
    const auto shards = parameters(trained.model);
    if (world.rank() == 1) {
      shards.front().grad().fill_(std::nan(""));
    }
    scaler.unscale_(*trained.optimizer);
    for (const auto& shard : shards) {
      shard.grad().nan_to_num_();
    }
    scaler.clip_grad_norm_(trained.model, 1.0);
    const auto before = shards.back().detach().clone();
    scaler.step(*trained.optimizer);
    scaler.update();
    EXPECT_FALSE(torch::equal(shards.back().detach(), before));
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

TEST(ScalerOnRanksTest, RejectsScalesThatDiffer) {
  on_ranks(2, [](const Group& world) {
    const auto param = leaf();
    optim::SGD optimizer({param}, 0.5);
    GradScaler scaler(
        GradScalerOptions().init_scale(world.rank() == 0 ? 4 : 8));
    EXPECT_THAT(
        error_of([&] {
          scaler.scale(torch::ones({}));
          param.mutable_grad() = torch::ones({3});
          scaler.step(optimizer);
        }),
        AllOf(HasSubstr("scale 4"), HasSubstr("scale 8")));
    EXPECT_TRUE(torch::equal(param.detach(), torch::ones({3})));
    GradScaler by_itself(GradScalerOptions()
                             .init_scale(world.rank() == 0 ? 4 : 8)
                             .group(world.alone()));
    by_itself.scale(torch::ones({}));
    param.mutable_grad() = torch::full({3}, 8.0f);
    by_itself.step(optimizer);
    EXPECT_EQ(param[0].item<float>(), world.rank() == 0 ? 0 : 0.5);
  });
}

TEST(ScalerOnRanksTest, TravelsInCheckpoints) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Trained<optim::AdamW> trained(FrontEnd::Dim0);
    GradScaler scaler(GradScalerOptions().init_scale(4).growth_interval(2));
    for (int i = 0; i < 3; ++i) {
      scaler.scale(loss_of(trained.model, tokens(world.rank(), i))).backward();
      scaler.step(*trained.optimizer);
      scaler.update();
      trained.optimizer->zero_grad();
    }
    checkpoint::save(scaler, folder.path() / "scaler");
    TrainingState training(trained.model, {*trained.optimizer});
    training.values = {{"scaler", scaler.state_dict()}};
    checkpoint::save(training, folder.path() / "run");

    GradScaler alone;
    checkpoint::load(alone, folder.path() / "scaler");
    EXPECT_EQ(alone.state_dict(), scaler.state_dict());
    EXPECT_EQ(alone.get_scale(), 8);
    GradScaler resumed;
    training.values = {{"scaler", resumed.state_dict()}};
    checkpoint::load(training, folder.path() / "run");
    resumed.load_state_dict(training.values.at("scaler").dict());
    EXPECT_EQ(resumed.state_dict(), scaler.state_dict());
  });
}

TEST(ScalerOnRanksTest, RejectsOptimizersThatStepInBackward) {
  on_ranks(2, [](const Group&) {
    Stack model = make_stack();
    DistributedDataParallel<StackImpl> ddp(model.ptr());
    ZeroRedundancyOptimizer zero(
        parameters(model),
        optimizer_class<optim::AdamW>(1e-3),
        ZeroOptions().overlap_with_ddp(true));
    GradScaler scaler;
    scaler.scale(torch::ones({}));
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { scaler.unscale_(zero); }, [&] { scaler.step(zero); }}) {
      EXPECT_THAT(error_of(call), HasSubstr("made with overlap_with_ddp"));
    }
  });
}

} // namespace
} // namespace tessera
