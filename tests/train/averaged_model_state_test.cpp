// Dictionaries of averages, and their checkpoints.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/train/averaged_model.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "train/averaged.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(AveragedModelTest, GoesFromAnyShardingToAnyOther) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    const auto pair = world.subgroup({0, 1});
    for (const Kind from : kKinds) {
      SCOPED_TRACE(static_cast<int>(from));
      const std::string name = "from_" + std::to_string(static_cast<int>(from));
      std::vector<uint8_t> bytes;
      if (pair) {
        Model model(from, *pair);
        AveragedModel averaged(
            model.net,
            AveragedModelOptions().multi_avg_fn(get_ema_multi_avg_fn(0.5)));
        for (int step = 0; step < 3; ++step) {
          model.step(step);
          averaged.update_parameters();
        }
        checkpoint::save(
            averaged, folder / name, checkpoint::SaveOptions().group(*pair));
        bytes = state_dict_to_bytes(averages_of(averaged, model));
      }
      const StateDict expected =
          state_dict_from_bytes(world.broadcast_bytes(bytes, 0));
      for (const Kind to : kKinds) {
        SCOPED_TRACE(static_cast<int>(to));
        Model model(to, world, /*seed=*/9);
        const StateDict own = model.full();
        AveragedModel averaged(model.net);
        checkpoint::load(averaged, folder / name);
        EXPECT_EQ(averaged.n_averaged(), 3);
        EXPECT_EQ(diff_state_dicts(model.full(), own), "");
        EXPECT_EQ(diff_state_dicts(averages_of(averaged, model), expected), "");

        // The same from a dictionary of full tensors.
        StateDict dict{{"n_averaged", 3}};
        for (const auto& [key, value] : expected) {
          dict.set("module." + key.name(), value);
        }
        AveragedModel other(model.net);
        other.load_state_dict(dict);
        EXPECT_EQ(other.n_averaged(), 3);
        EXPECT_EQ(diff_state_dicts(model.full(), own), "");
        EXPECT_EQ(diff_state_dicts(averages_of(other, model), expected), "");
      }
    }
  });
}

TEST(AveragedModelTest, NamesAreThoseOfPython) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::FsdpFlat, world);
    AveragedModel averaged(model.net);
    std::vector<std::string> names;
    for (const StateKey& key : averaged.state_dict().keys()) {
      names.push_back(key.name());
    }
    EXPECT_THAT(
        names,
        ::testing::ElementsAre(
            "n_averaged",
            "module.first.weight",
            "module.first.bias",
            "module.norm.weight",
            "module.norm.bias",
            "module.norm.running_mean",
            "module.norm.running_var",
            "module.norm.num_batches_tracked",
            "module.head.weight",
            "module.head.bias"));
    EXPECT_EQ(
        averaged.state_dict().at("n_averaged").tensor().scalar_type(),
        at::kLong);
  });
}

TEST(AveragedModelTest, LoadingRejectsWhatDoesNotFitAndChangesNothing) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Dim0, world);
    AveragedModel averaged(model.net);
    averaged.update_parameters();
    model.step(0);
    const StateDict own = model.full();
    const StateDict before = averages_of(averaged, model);
    StateDict changed = averaged.state_dict().clone();
    changed.erase("module.head.bias");
    changed.set("n_averaged", 7);
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("missing \"head.bias\""));
    changed = averaged.state_dict().clone();
    changed.set("head.bias", 7);
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("the dictionary has the key \"head.bias\""));
    changed = averaged.state_dict();
    changed.set("module.first.weight", torch::zeros({7, 6}, at::kDouble));
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("this value was replaced or removed"));
    EXPECT_EQ(averaged.n_averaged(), 1);
    EXPECT_EQ(diff_state_dicts(model.full(), own), "");
    EXPECT_EQ(diff_state_dicts(averages_of(averaged, model), before), "");
  });
}

} // namespace
} // namespace tessera::testing
