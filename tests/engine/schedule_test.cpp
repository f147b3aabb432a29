// When units are gathered, reduced and freed, as ScheduleProbe sees it.
#include "engine/schedule.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using Kind = ShardEvent::Kind;

/// Three units below a root that has no parameters: x -> x W0 W1 W2, with
/// matrices (2, 2). Writes down what the schedule does with them.
class Chain {
 public:
  explicit Chain(const Group& world, const UnitOptions& options = {})
      : Chain(Groups{.all = world, .shard = world}, options) {}
  explicit Chain(Groups all_groups, const UnitOptions& options = {})
      : groups(std::move(all_groups)),
        schedule(Schedule::of(groups.all)),
        root(schedule->add_unit("root", 0, {}, groups, options)) {
    for (int i = 0; i < 3; ++i) {
      faces.push_back(torch::eye(2).mul(i + 1).set_requires_grad(true));
      units.push_back(schedule->add_unit(
          std::to_string(i),
          i + 1,
          {{"weight", faces.back()}},
          groups,
          options));
      units.back()->set_parent(root);
    }
    schedule->probe_for_tests().observer = [this](const ShardEvent& event) {
      write_down(event);
    };
  }
  ~Chain() {
    schedule->probe_for_tests().observer = nullptr;
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  /// Through all units whose faces are there.
  at::Tensor forward() const {
    at::Tensor x = torch::ones({1, 2}, torch::requires_grad());
    for (const at::Tensor& face : faces) {
      x = face.defined() ? x.mm(face) : x;
    }
    return x.sum();
  }
  void step() const {
    forward().backward();
  }
  at::Tensor leaf(size_t index) const {
    return units[index]->params().leaves().front();
  }
  std::vector<at::Tensor> leaves() const {
    return {leaf(0), leaf(1), leaf(2)};
  }
  bool all_sharded() const {
    for (const auto& unit : units) {
      if (unit && unit->state() != UnitState::Sharded) {
        return false;
      }
    }
    return true;
  }
  int reducing() const {
    int count = 0;
    for (const auto& unit : units) {
      count += unit->gradients().is_reducing() ? 1 : 0;
    }
    return count;
  }
  /// The unit's last owners: its face, and this object.
  void drop(size_t index) {
    units[index].reset();
    faces[index].reset();
  }
  std::vector<std::string> take_log() {
    return std::exchange(log_, {});
  }
  const ScheduleCounts& counts() const {
    return schedule->probe_for_tests().counts;
  }

  const Groups groups;
  const std::shared_ptr<Schedule> schedule;
  const std::shared_ptr<Unit> root;
  std::vector<at::Tensor> faces;
  std::vector<std::shared_ptr<Unit>> units;

 private:
  void write_down(const ShardEvent& event) {
    switch (event.kind) {
      case Kind::Gather:
        log_.push_back(
            (event.ahead ? "ahead " : "gather ") + event.unit.name());
        break;
      case Kind::Reshard:
        log_.push_back("free " + event.unit.name());
        break;
      case Kind::Reduce:
        log_.push_back("reduce " + event.unit.name());
        break;
      case Kind::ReduceWait:
        log_.push_back("reduced " + event.unit.name());
        break;
      default:
        break;
    }
  }

  std::vector<std::string> log_;
};

TEST(ScheduleTest, IsOneForAGroup) {
  on_ranks(2, [](const Group& world) {
    const auto schedule = Schedule::of(world);
    EXPECT_EQ(Schedule::of(world), schedule);
    EXPECT_NE(Schedule::of(*world.split(0)), schedule);
  });
}

TEST(ScheduleTest, ForwardFreesAUnitWhenTheNextOneIsTouched) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.forward();
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre("gather 0", "free 0", "gather 1", "free 1", "gather 2"));
    EXPECT_EQ(chain.units[2]->state(), UnitState::Full);
    chain.schedule->reshard(*chain.units[2]);
    EXPECT_THAT(chain.take_log(), ElementsAre("free 2"));
  });
}

TEST(ScheduleTest, BackwardFreesAUnitAndReducesItBesideTheNextOne) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    const at::Tensor loss = chain.forward();
    chain.take_log();
    loss.backward();
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre(
            "free 2",
            "reduce 2",
            "gather 1",
            "reduced 2",
            "free 1",
            "reduce 1",
            "gather 0",
            "reduced 1",
            "free 0",
            "reduce 0",
            "reduced 0"));
    EXPECT_TRUE(chain.all_sharded());
  });
}

TEST(ScheduleTest, ASecondIterationGathersEachUnitAhead) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.step();
    EXPECT_EQ(chain.counts().prefetched, 0);
    EXPECT_EQ(chain.counts().gathers, 5);
    chain.take_log();
    chain.forward().backward();
    EXPECT_EQ(chain.counts().prefetched, 4); // all but the first
    EXPECT_EQ(chain.counts().gathers, 10);
    const auto log = chain.take_log();
    ASSERT_GE(log.size(), 7U);
    EXPECT_THAT(
        std::vector<std::string>(log.begin(), log.begin() + 7),
        ElementsAre(
            "gather 0",
            "ahead 1",
            "free 0",
            "ahead 2",
            "free 1",
            "ahead 1",
            "free 2"));
  });
}

constexpr int64_t kMuchMemory = 1 << 20;

TEST(ScheduleTest, MemoryForOverlapLetsGathersAndReductionsRunFurther) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world, {.overlap_bytes = kMuchMemory});
    chain.step();
    chain.take_log();
    chain.step();
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre(
            "gather 0",
            "ahead 1",
            "ahead 2", // and 1 once more, when it was freed
            "free 0",
            "free 1",
            "ahead 1",
            "ahead 0",
            "free 2",
            "reduce 2",
            "free 1",
            "reduce 1",
            "free 0",
            "reduce 0",
            "reduced 2",
            "reduced 1",
            "reduced 0"));
    EXPECT_EQ(chain.counts().prefetched, 4);
    EXPECT_TRUE(chain.all_sharded());
    EXPECT_EQ(chain.reducing(), 0);
  });
}

TEST(ScheduleTest, MemoryForOverlapChangesNoBit) {
  on_ranks(2, [](const Group& world) {
    const auto gradients = [&](int64_t overlap_bytes) {
      Chain chain(world, {.overlap_bytes = overlap_bytes});
      std::vector<at::Tensor> result;
      for (int step = 0; step < 3; ++step) {
        (chain.forward() * (0.1 + world.rank())).backward();
      }
      for (const at::Tensor& leaf : chain.leaves()) {
        result.push_back(leaf.grad().clone());
      }
      return result;
    };
    const auto expected = gradients(0);
    const auto found = gradients(kMuchMemory);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::equal(found[i], expected[i]));
    }
  });
}

TEST(ScheduleTest, GradientsThatWaitKeepWhatTheNextForwardBeginsWith) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    const auto set_syncs = [&](bool on) {
      for (const auto& unit : chain.units) {
        unit->gradients().set_syncs(on);
      }
    };
    set_syncs(false);
    chain.step();
    EXPECT_TRUE(chain.all_sharded()); // nothing is foreseen yet
    chain.step();
    EXPECT_EQ(chain.units[0]->state(), UnitState::Full);
    EXPECT_EQ(chain.units[1]->state(), UnitState::Full);
    EXPECT_EQ(chain.units[2]->state(), UnitState::Sharded);
    set_syncs(true);
    chain.take_log();
    chain.step();
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre(
            "free 0",
            "ahead 2",
            "free 1",
            "ahead 1",
            "free 2",
            "reduce 2",
            "ahead 0",
            "reduced 2",
            "free 1",
            "reduce 1",
            "reduced 1",
            "free 0",
            "reduce 0",
            "reduced 0"));
    EXPECT_TRUE(chain.all_sharded());
    EXPECT_TRUE(torch::equal(
        chain.leaf(0).grad(), torch::full_like(chain.leaf(0), 3 * 6)));
  });
}

TEST(ScheduleTest, AWriteRenewsWhatStayedForTheNextForward) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    for (const auto& unit : chain.units) {
      unit->gradients().set_syncs(false);
    }
    chain.step();
    chain.step();
    ASSERT_EQ(chain.units[0]->state(), UnitState::Full);
    {
      const at::NoGradGuard no_grad;
      chain.leaf(0).mul_(2);
    }
    EXPECT_EQ(chain.forward().item<float>(), 2 * 2 * 6);
    chain.schedule->recover();
    EXPECT_TRUE(chain.all_sharded());
  });
}

TEST(ScheduleTest, ReducingWhatWaitsFreesWhatStayed) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    for (const auto& unit : chain.units) {
      unit->gradients().set_syncs(false);
    }
    chain.step();
    chain.step();
    chain.schedule->reduce_waiting(chain.units);
    EXPECT_TRUE(chain.all_sharded());
    EXPECT_TRUE(chain.leaf(0).grad().defined());
  });
}

TEST(ScheduleTest, UnitsThatAreKeptAfterForwardAreGatheredOnce) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world, {.reshard_after_forward = false});
    chain.forward();
    EXPECT_THAT(
        chain.take_log(), ElementsAre("gather 0", "gather 1", "gather 2"));
    chain.schedule->recover();
  });
}

TEST(ScheduleTest, AUnitThatTheUserGatheredStaysUntilReshard) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.schedule->gather(*chain.units[0]);
    chain.forward();
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre("gather 0", "gather 1", "free 1", "gather 2"));
    chain.schedule->reshard(*chain.units[0]);
    EXPECT_EQ(chain.units[0]->state(), UnitState::Sharded);
    chain.schedule->recover();
  });
}

TEST(ScheduleTest, OneReductionIsInFlight) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    const at::Tensor loss = chain.forward();
    std::vector<int> others; // reducing when a reduction starts
    chain.schedule->probe_for_tests().observer = [&](const ShardEvent& event) {
      if (event.kind == Kind::Reduce) {
        others.push_back(chain.reducing());
      }
    };
    loss.backward();
    EXPECT_THAT(others, ElementsAre(0, 0, 0));
    EXPECT_EQ(chain.reducing(), 0);
  });
}

TEST(ScheduleTest, AverageGradientsGetToTheLeaves) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    (chain.forward() * (1 + 2 * world.rank())).backward();
    // Of 1 and 3. Weights are I, 2 I and 3 I.
    const float expected[] = {2 * 6, 2 * 3, 2 * 2};
    for (size_t i = 0; i < 3; ++i) {
      const at::Tensor gradient = chain.leaf(i).grad();
      EXPECT_TRUE(
          torch::equal(gradient, torch::full_like(gradient, expected[i])));
    }
  });
}

TEST(ScheduleTest, AnEngineThatAsksForGradientsGetsThemInsteadOfTheLeaves) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    const auto gradients = torch::autograd::grad(
        {chain.forward() * (1 + 2 * world.rank())}, chain.leaves());
    ASSERT_EQ(gradients.size(), 3U);
    EXPECT_TRUE(
        torch::equal(gradients[2], torch::full_like(chain.leaf(2), 2 * 2)));
    for (const at::Tensor& leaf : chain.leaves()) {
      EXPECT_FALSE(leaf.grad().defined());
    }
    EXPECT_TRUE(chain.all_sharded());
    EXPECT_EQ(chain.reducing(), 0);
  });
}

TEST(ScheduleTest, GradientsWaitForABackwardThatSynchronises) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    for (const auto& unit : chain.units) {
      unit->gradients().set_syncs(false);
    }
    chain.step();
    EXPECT_EQ(chain.counts().reductions, 0);
    EXPECT_FALSE(chain.leaf(2).grad().defined());
    for (const auto& unit : chain.units) {
      unit->gradients().set_syncs(true);
    }
    // Reads unit 0 alone; the others' belong to this step all the same.
    torch::ones({1, 2}).mm(chain.faces[0]).sum().backward();
    EXPECT_EQ(chain.counts().reductions, 3);
    EXPECT_TRUE(torch::equal(
        chain.leaf(0).grad(), torch::full_like(chain.leaf(0), 6 + 1)));
    EXPECT_TRUE(
        torch::equal(chain.leaf(2).grad(), torch::full_like(chain.leaf(2), 2)));
  });
}

/// Two copies of the model, each of two ranks.
Groups hybrid(const Group& world) {
  return {
      .all = world,
      .shard = *world.split(world.rank() / 2),
      .replicate = *world.split(world.rank() % 2)};
}

TEST(ScheduleTest, TheAverageOverCopiesRunsBesideTheBackwardOfOneUnitMore) {
  on_ranks(4, [](const Group& world) {
    Chain chain(hybrid(world));
    at::Tensor x =
        torch::ones({1, 2}, torch::requires_grad()).mm(chain.faces[0]);
    int reducing = 0;
    x.register_hook([&](const at::Tensor&) { reducing = chain.reducing(); });
    const at::Tensor loss = x.mm(chain.faces[1]).mm(chain.faces[2]).sum();
    chain.take_log();
    (loss * (world.rank() + 1)).backward();
    EXPECT_EQ(reducing, 2); // 2 over the copies, 1 over its shards
    std::vector<std::string> reductions;
    for (const std::string& entry : chain.take_log()) {
      if (entry.starts_with("reduce")) {
        reductions.push_back(entry);
      }
    }
    EXPECT_THAT(
        reductions,
        ElementsAre(
            "reduce 2",
            "reduced 2", // over the shards
            "reduce 1",
            "reduced 2", // over the copies
            "reduced 1",
            "reduce 0",
            "reduced 1",
            "reduced 0",
            "reduced 0"));
    EXPECT_EQ(chain.reducing(), 0);
    for (size_t i = 0; i < 3; ++i) { // each product of the other two, averaged
      EXPECT_TRUE(torch::equal(
          chain.leaf(i).grad(),
          torch::full_like(
              chain.leaf(i), 2.5 * 6 / static_cast<double>(i + 1))));
    }
  });
}

TEST(ScheduleTest, AUnitThatIsUsedTwiceFinishesItsAverageOverCopiesFirst) {
  on_ranks(4, [](const Group& world) {
    Chain chain(hybrid(world));
    chain.schedule->reshard(*chain.units[0]);
    at::Tensor x = torch::ones({1, 2}, torch::requires_grad());
    x = x.mm(chain.faces[0]);
    chain.schedule->reshard(*chain.units[0]); // so it gets a second node
    x.mm(chain.faces[0]).sum().backward();
    // d/dW (1 W W): with W = 1 twice the ones.
    EXPECT_TRUE(
        torch::equal(chain.leaf(0).grad(), torch::full_like(chain.leaf(0), 2)));
  });
}

TEST(ScheduleTest, RecoversWhileAnAverageOverCopiesIsUnderWay) {
  on_ranks(4, [](const Group& world) {
    Chain chain(hybrid(world));
    chain.step();
    const at::Tensor kept = chain.leaf(0).grad().clone();
    at::Tensor x =
        torch::ones({1, 2}, torch::requires_grad()).mm(chain.faces[0]);
    x.register_hook([&](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("of the user");
    });
    const at::Tensor loss = x.mm(chain.faces[1]).mm(chain.faces[2]).sum();
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("of the user"));
    EXPECT_EQ(chain.reducing(), 0);
    chain.step();
    EXPECT_TRUE(torch::equal(chain.leaf(0).grad(), 2 * kept));
  });
}

TEST(ScheduleTest, RecoversFromABackwardThatThrows) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.step();
    chain.step(); // gathers ahead by now
    const auto before = chain.counts().prefetched;
    std::vector<at::Tensor> kept;
    for (const at::Tensor& leaf : chain.leaves()) {
      kept.push_back(leaf.grad().clone());
    }
    at::Tensor x =
        torch::ones({1, 2}, torch::requires_grad()).mm(chain.faces[0]);
    x = x.mm(chain.faces[1]);
    int in_flight = 0;
    x.register_hook([&](const at::Tensor&) -> at::Tensor {
      in_flight = chain.reducing();
      throw std::runtime_error("of the user");
    });
    const at::Tensor loss = x.mm(chain.faces[2]).sum();
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("of the user"));
    EXPECT_GT(chain.counts().prefetched, before);
    EXPECT_EQ(in_flight, 1);
    EXPECT_TRUE(chain.all_sharded());
    EXPECT_EQ(chain.reducing(), 0);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_FALSE(chain.units[i]->gradients().has_waiting());
    }
    // No order is known now, and nothing of the failed backward is left.
    const auto prefetched = chain.counts().prefetched;
    chain.step();
    EXPECT_EQ(chain.counts().prefetched, prefetched);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::equal(chain.leaf(i).grad(), kept[i] * 1.5));
    }
    chain.step(); // as it went after the failed backward, not in it
    EXPECT_EQ(chain.counts().prefetched, prefetched + 4);
  });
}

TEST(ScheduleTest, RecoveringFreesWhatWasGathered) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.schedule->gather(*chain.units[0]);
    chain.schedule->gather(*chain.units[2]);
    chain.take_log();
    chain.schedule->recover();
    EXPECT_THAT(chain.take_log(), ElementsAre("free 0", "free 2"));
    EXPECT_TRUE(chain.all_sharded());
  });
}

TEST(ScheduleTest, AUnitThatDiesIsNeitherFreedNorForeseen) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.step();
    chain.step();
    chain.schedule->gather(*chain.units[1]);
    chain.drop(1);
    chain.take_log();
    chain.step(); // would free it, and gather it after unit 0
    EXPECT_THAT(
        chain.take_log(),
        ElementsAre(
            "gather 0",
            "free 0",
            "gather 2",
            "free 2",
            "reduce 2",
            "gather 0",
            "reduced 2",
            "free 0",
            "reduce 0",
            "reduced 0"));
  });
}

TEST(ScheduleTest, AUnitMayDieWhileItsGatherIsInFlight) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.step();
    torch::ones({1, 2}).mm(chain.faces[0]); // foresees unit 1
    EXPECT_EQ(chain.units[1]->state(), UnitState::Gathering);
    chain.drop(1);
    chain.schedule->recover();
    EXPECT_TRUE(chain.all_sharded());
    chain.step();
    EXPECT_TRUE(chain.leaf(0).grad().defined());
  });
}

TEST(ScheduleTest, RefusesASecondThread) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    std::string said;
    // The observer is called in the middle of a touch.
    chain.schedule->probe_for_tests().observer = [&](const ShardEvent& event) {
      if (event.kind == Kind::Gather && said.empty()) {
        std::thread([&] {
          Unit* const unit = chain.units[1].get();
          said = error_of([&] { chain.schedule->touch({&unit, 1}); });
        }).join();
      }
    };
    chain.step();
    EXPECT_THAT(said, HasSubstr("unit \"1\": a second thread uses"));
    EXPECT_TRUE(chain.leaf(0).grad().defined());
  });
}

TEST(ScheduleTest, ThreadsMayTakeTurns) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    chain.step();
    const at::Tensor once = chain.leaf(0).grad().clone();
    std::string said;
    std::thread([&] { said = error_of([&] { chain.step(); }); }).join();
    EXPECT_EQ(said, "nothing was thrown");
    EXPECT_TRUE(torch::equal(chain.leaf(0).grad(), once * 2));
  });
}

TEST(ScheduleTest, BackwardRefusesShardsThatWereWrittenSinceForward) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    const at::Tensor loss = chain.forward();
    {
      const at::NoGradGuard no_grad;
      chain.leaf(1).add_(1);
    }
    EXPECT_THAT(
        error_of([&] { loss.backward(); }), HasSubstr("the shard was changed"));
    EXPECT_TRUE(chain.all_sharded());
    chain.step(); // with the new values
    EXPECT_TRUE(chain.leaf(1).grad().defined());
  });
}

TEST(ScheduleTest, RefusesToReadWhatIsSummoned) {
  on_ranks(2, [](const Group& world) {
    Chain chain(world);
    Unit* const unit = chain.units[0].get();
    chain.schedule->summon(*unit, {});
    EXPECT_EQ(chain.counts().summons, 1);
    EXPECT_THAT(
        error_of([&] {
          chain.schedule->touch({&unit, 1});
        }),
        HasSubstr("before summon_full_params"));
    chain.schedule->end_summon(*unit);
    EXPECT_EQ(unit->state(), UnitState::Sharded);
    chain.step();
    EXPECT_TRUE(chain.leaf(0).grad().defined());
  });
}

} // namespace
} // namespace tessera::engine
