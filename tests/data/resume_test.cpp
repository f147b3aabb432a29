// Runs that stop in the middle of an epoch and go on with other ranks.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/data/loader.h>
#include <tessera/optim/sgd.h>
#include <tessera/train/training_state.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::first_numbers;
using ::testing::HasSubstr;
using testing::joined;
using testing::Numbers;
using testing::of_all_ranks;
using testing::on_ranks;
using testing::rest_of;
using testing::sorted;
using testing::TempFolder;
using testing::values_of;

LoaderOptions options_of(int64_t batch_size) {
  return LoaderOptions()
      .batch_size(batch_size)
      .seed(11)
      .epoch_end(EpochEnd::Uneven);
}

// Two samples are left for four ranks: two ranks get none of the last batch.
TEST(ResumeTest, RanksThatGotNoneOfTheLastBatchAreAsFarAsTheOthers) {
  on_ranks(4, [](const Group& world) {
    Loader loader(Numbers{.count = 6}, options_of(1).auto_commit(false));
    while (loader.next()) {
      loader.commit();
    }
    EXPECT_EQ(loader.position(), (Position{1, 0})) << world.rank();
  });
}

// A checkpoint of the step in which some ranks got none of the last samples.
TEST(ResumeTest, TheRoundInWhichSomeRanksGetNoneCanBeSaved) {
  on_ranks(4, [](const Group& world) {
    for (const bool auto_commit : {true, false}) {
      const auto options = options_of(1).auto_commit(auto_commit);
      Loader loader(Numbers{.count = 6}, options);
      (void)loader.next();
      const bool has_batch = loader.next().has_value();
      EXPECT_EQ(has_batch, world.rank() < 2);
      loader.commit();
      EXPECT_EQ(loader.position(), (Position{1, 0})) << world.rank();
      EXPECT_EQ(loader.batches_left(), has_batch ? 0 : 1) << world.rank();

      Loader resumed(Numbers{.count = 6}, options);
      resumed.load_state_dict(loader.state_dict());
      if (has_batch) {
        EXPECT_FALSE(loader.next()); // the epoch ends here for these ranks
      }
      EXPECT_EQ(loader.batches_left(), has_batch ? 2 : 1) << world.rank();
      EXPECT_EQ(rest_of(resumed), rest_of(loader)); // the next epoch
      EXPECT_EQ(loader.delivered(), (Position{2, 0})) << world.rank();
    }
  });
}

TEST(ResumeTest, OtherRanksTakeTheRestOfTheEpoch) {
  on_ranks(4, [](const Group& world) {
    const auto pair = world.subgroup({0, 1});
    std::vector<int64_t> seen;
    StateDict state;
    if (pair) {
      Loader loader(
          Numbers{.count = 101}, options_of(3).group(*pair).prefetch(4));
      for (int i = 0; i < 5; ++i) {
        const auto values = values_of(*loader.next());
        seen.insert(seen.end(), values.begin(), values.end());
      }
      state = loader.state_dict(); // what is read ahead does not count
      EXPECT_EQ(loader.position(), (Position{0, 30}));
    }
    const auto bytes = state_dict_to_bytes(state);
    const auto common = world.broadcast_bytes(bytes, 0);
    Loader loader(Numbers{.count = 101}, options_of(5));
    loader.load_state_dict(state_dict_from_bytes(common));
    const auto rest = joined(rest_of(loader));
    seen.insert(seen.end(), rest.begin(), rest.end());
    EXPECT_EQ(sorted(of_all_ranks(world, seen)), first_numbers(101));
    EXPECT_EQ(loader.position(), (Position{1, 0}));
  });
}

TEST(ResumeTest, EveryMomentIsAMomentToStop) {
  Loader whole(Numbers{.count = 23}, options_of(4));
  std::vector<StateDict> states{whole.state_dict()};
  std::vector<std::optional<std::vector<int64_t>>> expected;
  for (int i = 0; i < 16; ++i) { // ends of epochs among them
    const auto batch = whole.next();
    expected.push_back(batch ? std::optional(values_of(*batch)) : std::nullopt);
    states.push_back(whole.state_dict());
  }
  Loader resumed(Numbers{.count = 23}, options_of(4));
  for (size_t stop = 0; stop < states.size(); ++stop) {
    SCOPED_TRACE(stop);
    resumed.load_state_dict(states[stop]); // with batches read ahead
    for (size_t i = stop; i < expected.size(); ++i) {
      const auto batch = resumed.next();
      ASSERT_EQ(
          batch ? std::optional(values_of(*batch)) : std::nullopt, expected[i]);
    }
  }
}

TEST(ResumeTest, SamplesOfAnUnfinishedAccumulationComeAgain) {
  const auto options =
      options_of(2).auto_commit(false).epoch_end(EpochEnd::Continue);
  Loader loader(Numbers{.count = 20}, options);
  std::vector<std::vector<int64_t>> delivered;
  for (int i = 0; i < 5; ++i) { // a step has three batches
    delivered.push_back(values_of(*loader.next()));
    if (i == 2) {
      loader.commit();
    }
  }
  EXPECT_EQ(loader.position(), (Position{0, 6}));
  EXPECT_EQ(loader.delivered(), (Position{0, 10}));
  Loader resumed(Numbers{.count = 20}, options);
  resumed.load_state_dict(loader.state_dict());
  EXPECT_EQ(values_of(*resumed.next()), delivered[3]);
  EXPECT_EQ(values_of(*resumed.next()), delivered[4]);
  EXPECT_EQ(values_of(*resumed.next()), values_of(*loader.next()));
}

TEST(ResumeTest, AnAccumulationMayReachIntoTheNextEpoch) {
  Loader loader(Numbers{.count = 4}, options_of(2).auto_commit(false));
  (void)loader.next();
  loader.commit();
  (void)loader.next();
  EXPECT_FALSE(loader.next()); // the end of the epoch is no commit
  (void)loader.next();
  EXPECT_EQ(loader.position(), (Position{0, 2}));
  loader.commit();
  EXPECT_EQ(loader.position(), (Position{1, 2}));
}

TEST(ResumeTest, RejectsTheStateOfOtherData) {
  Loader loader(Numbers{.count = 20}, options_of(2));
  Loader longer(Numbers{.count = 21}, options_of(2));
  const auto expected = values_of(*loader.next());
  EXPECT_THAT(
      error_of([&] { loader.load_state_dict(longer.state_dict()); }),
      HasSubstr("21 against 20"));
  EXPECT_EQ(loader.position(), (Position{0, 2})); // as it was
}

// ---- In a TrainingState -----------------------------------------------------

struct Trial {
  explicit Trial(const Group& group, int64_t batch_size = 3)
      : loader(Numbers{.count = 50}, options_of(batch_size).group(group)) {
    torch::manual_seed(1);
    model = torch::nn::Linear(2, 2);
    optimizer = std::make_unique<optim::SGD>(model->parameters(), /*lr=*/0.1);
    training =
        std::make_unique<TrainingState>(*model, OptimizerRefs{*optimizer});
  }

  Loader<Numbers> loader;
  torch::nn::Linear model{nullptr};
  std::unique_ptr<optim::SGD> optimizer;
  std::unique_ptr<TrainingState> training;
};

TEST(TrainingStatePartsTest, APartIsSavedAndLoadedWithTheRest) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Trial run(world);
    run.training->add("data", run.loader);
    (void)run.loader.next();
    (void)run.loader.next();
    checkpoint::save(*run.training, folder / "c");
    const auto rest = joined(rest_of(run.loader));

    Trial again(world);
    again.training->add("data", again.loader);
    checkpoint::load(*again.training, folder / "c");
    EXPECT_EQ(again.loader.position(), (Position{0, 12}));
    EXPECT_EQ(joined(rest_of(again.loader)), rest);

    // One rank goes on alone.
    Trial alone(world.alone(), 38);
    alone.training->add("data", alone.loader);
    checkpoint::load(
        *alone.training,
        folder / "c",
        checkpoint::LoadOptions().group(world.alone()));
    EXPECT_EQ(
        sorted(values_of(*alone.loader.next())),
        sorted(of_all_ranks(world, rest)));

    // A run without the part would begin its data anew.
    Trial without(world);
    (void)without.loader.next();
    EXPECT_THAT(
        error_of([&] { checkpoint::load(*without.training, folder / "c"); }),
        AllOf(
            HasSubstr("nothing was loaded"),
            HasSubstr("the part \"data\" is in the checkpoint only"),
            HasSubstr("TrainingState::add")));
    checkpoint::load(
        *without.training,
        folder / "c",
        checkpoint::LoadOptions().optional(
            [](const std::string& name) { return name.starts_with("data."); }));
    EXPECT_EQ(without.loader.position(), (Position{0, 6})); // as it was
    // A dictionary has the parts that its writer chose.
    auto model = get_model_state_dict(without.model);
    StateDict weights{{"model", std::move(model)}};
    checkpoint::load(weights, folder / "c");
  });
}

TEST(TrainingStatePartsTest, APartThatAnOldCheckpointLacksIsNamed) {
  const TempFolder folder;
  Loader loader(Numbers{.count = 50}, options_of(3));
  torch::nn::Linear model(2, 2);
  optim::SGD optimizer(model->parameters(), 0.1);
  TrainingState before(*model, {optimizer});
  checkpoint::save(before, folder / "old");
  TrainingState after(*model, {optimizer});
  after.add("data", loader);
  (void)loader.next();
  EXPECT_THAT(
      error_of([&] { checkpoint::load(after, folder / "old"); }),
      AllOf(HasSubstr("data.epoch"), HasSubstr("data.samples")));
  EXPECT_EQ(loader.position(), (Position{0, 3})); // as it was
}

TEST(TrainingStatePartsTest, APartThatIsRefusedChangesNothing) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Trial run(world);
    run.training->values = {{"step", 1}};
    run.training->add("data", run.loader);
    (void)run.loader.next();
    checkpoint::save(*run.training, folder / "c");

    Trial other(world);
    other.model->weight.data().fill_(3);
    Loader longer(Numbers{.count = 51}, options_of(3).group(world));
    other.training->values = {{"step", 2}};
    other.training->add("data", longer);
    EXPECT_THAT(
        error_of([&] { checkpoint::load(*other.training, folder / "c"); }),
        HasSubstr("50 against 51"));
    EXPECT_TRUE(torch::equal(other.model->weight, torch::full({2, 2}, 3.0)));
    EXPECT_EQ(other.training->values.at("step").to_int(), 2);
    EXPECT_EQ(longer.position(), Position());
  });
}

TEST(TrainingStatePartsTest, RejectsNamesThatAreTaken) {
  torch::nn::Linear model(2, 2);
  TrainingState training(*model, {});
  Loader loader(Numbers{.count = 5});
  for (const char* name : {"model", "optim", "rng", "values"}) {
    EXPECT_THAT(
        error_of([&] { training.add(name, loader); }),
        AllOf(HasSubstr(name), HasSubstr("itself")));
  }
  EXPECT_THAT(error_of([&] { training.add("", loader); }), HasSubstr("empty"));
  EXPECT_THAT(
      error_of([&] { training.add("rng.x", loader); }), HasSubstr("dot"));
  training.add("data", loader);
  EXPECT_THAT(
      error_of([&] { training.add("data", loader); }),
      HasSubstr("added before"));
  EXPECT_EQ(training.state_dict().keys().size(), 5u);
}

/// Its "extra" may be missing.
struct Lenient : checkpoint::Stateful {
  StateDict state_dict() override {
    return has_extra ? StateDict{{"step", step}, {"extra", 7}}
                     : StateDict{{"step", step}};
  }
  void load_state_dict(const StateDict& state) override {
    step = state.at("step").to_int();
  }
  bool is_optional(const std::string& name) const override {
    return name == "extra";
  }
  bool has_extra = false;
  int64_t step = 0;
};

TEST(TrainingStatePartsTest, APartSaysWhatMayBeMissing) {
  const TempFolder folder;
  torch::nn::Linear model(2, 2);
  Lenient part;
  part.step = 4;
  TrainingState training(*model, {});
  training.add("scheduler", part);
  checkpoint::save(training, folder / "c");
  part = {};
  part.has_extra = true;
  checkpoint::load(training, folder / "c");
  EXPECT_EQ(part.step, 4);
}

} // namespace
} // namespace tessera::data
