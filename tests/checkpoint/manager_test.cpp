// The checkpoints of a run.
#include <tessera/checkpoint/manager.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "checkpoint/disk/files.h"
#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StateDict state_at(int64_t step, const Group& world) {
  return {
      {"w",
       cut(torch::full({10, 4}, static_cast<float>(step)), Cut::Rows, world)},
      {"step", step}};
}

/// The names in the folder after rank 0 has cleaned up.
std::vector<std::string> names_in(const fs::path& folder, const Group& world) {
  world.barrier();
  return testing::names_in(folder);
}

/// Changes a byte in the middle of a file.
void damage(const fs::path& path) {
  std::string bytes = testing::read_bytes(path);
  bytes[bytes.size() / 2] ^= 16;
  testing::write_bytes(path, bytes);
}

TEST(CheckpointManagerTest, KeepsTheLastAndEveryKth) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(
        folder / "run" / "checkpoints",
        ManagerOptions().keep_last(2).keep_every(30));
    EXPECT_EQ(manager.latest(), std::nullopt);
    for (int64_t step = 10; step <= 80; step += 10) {
      if (step % 20 == 0) {
        manager.async_save(step, state_at(step, world));
      } else {
        manager.save(step, state_at(step, world));
      }
    }
    manager.wait();
    EXPECT_THAT(
        names_in(manager.folder(), world),
        ElementsAre(
            "step_00000030",
            "step_00000060",
            "step_00000070",
            "step_00000080"));
    EXPECT_EQ(manager.latest(), 80);
    StateDict target = state_at(0, world);
    EXPECT_EQ(manager.load_latest(target), 80);
    EXPECT_EQ(diff_state_dicts(target, state_at(80, world)), "");
    manager.load(60, target);
    EXPECT_EQ(diff_state_dicts(target, state_at(60, world)), "");
  });
}

TEST(CheckpointManagerTest, KeepsTheStepThatIsProtected) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(1));
    const auto save = [&](int64_t step) {
      if (step % 20 == 0) {
        manager.async_save(step, state_at(step, world));
        manager.wait();
      } else {
        manager.save(step, state_at(step, world));
      }
    };
    save(10);
    save(20);
    manager.protect(20);
    for (const int64_t step : {30, 40, 50}) {
      save(step);
      EXPECT_THAT(
          names_in(manager.folder(), world),
          ElementsAre("step_00000020", manager.path_of(step).filename()));
    }
    // Another step takes its place.
    manager.protect(50);
    save(60);
    EXPECT_THAT(
        names_in(manager.folder(), world),
        ElementsAre("step_00000050", "step_00000060"));
    StateDict target = state_at(0, world);
    manager.load(50, target);
    EXPECT_EQ(diff_state_dicts(target, state_at(50, world)), "");
    EXPECT_EQ(manager.latest(), 60);
    manager.protect(std::nullopt);
    save(70);
    EXPECT_THAT(
        names_in(manager.folder(), world), ElementsAre("step_00000070"));
    EXPECT_THAT(
        error_of([&] { manager.protect(-1); }),
        HasSubstr("step -1 is negative"));
  });
}

TEST(CheckpointManagerTest, TheProtectedStepDoesNotCountAsOneOfTheLast) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(2));
    manager.save(10, state_at(10, world));
    manager.protect(10);
    for (const int64_t step : {20, 30, 40}) {
      manager.save(step, state_at(step, world));
    }
    EXPECT_THAT(
        names_in(manager.folder(), world),
        ElementsAre("step_00000010", "step_00000030", "step_00000040"));
  });
}

TEST(CheckpointManagerTest, AnEmptyFolderHasNothingToLoad) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    StateDict target = state_at(5, world);
    EXPECT_EQ(manager.load_latest(target), std::nullopt);
    if (world.rank() == 0) { // a name that only looks like a step's
      std::filesystem::create_directories(folder / "c" / "step_-0000001");
    }
    world.barrier();
    EXPECT_EQ(manager.latest(), std::nullopt);
    EXPECT_EQ(manager.load_latest(target), std::nullopt);
    EXPECT_EQ(diff_state_dicts(target, state_at(5, world)), "");
    EXPECT_THAT(
        error_of([&] { manager.load(3, target); }), HasSubstr("step_00000003"));
  });
}

TEST(CheckpointManagerTest, PassesOverWhatIsDamagedWithAReason) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(0));
    for (const int64_t step : {1, 2, 3, 4, 5}) {
      manager.save(step, state_at(step, world));
    }
    if (world.rank() == 0) {
      damage(manager.path_of(5) / "__1_0.distcp"); // seen when it is read
      fs::resize_file(manager.path_of(4) / "__0_0.distcp", 100);
      fs::remove(manager.path_of(3) / ".metadata");
    }
    world.barrier();
    const auto entries = manager.list();
    ASSERT_EQ(entries.size(), 5U);
    EXPECT_THAT(entries[1].problem, IsEmpty());
    EXPECT_THAT(entries[2].problem, HasSubstr("step_00000003"));
    EXPECT_THAT(entries[3].problem, HasSubstr("__0_0.distcp"));
    EXPECT_THAT(entries[4].problem, IsEmpty());
    EXPECT_EQ(manager.latest(), 5);

    StateDict target = state_at(0, world);
    EXPECT_EQ(manager.load_latest(target), 2);
    EXPECT_EQ(diff_state_dicts(target, state_at(2, world)), "");
    if (world.rank() == 0) {
      damage(manager.path_of(1) / ".checksums");
      damage(manager.path_of(2) / ".checksums");
    }
    world.barrier();
    EXPECT_THAT(
        error_of([&] { manager.load_latest(target); }),
        AllOf(HasSubstr("no checkpoint here"), HasSubstr("step_00000001")));
  });
}

TEST(CheckpointManagerTest, WhatDoesNotFitIsAnErrorAndNotPassedOver) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    manager.save(1, state_at(1, world));
    StateDict target{{"other", torch::zeros({2})}};
    EXPECT_THROW(manager.load_latest(target), c10::ValueError);
    // An error of the user is not damage either.
    target = state_at(0, world);
    manager.save(2, state_at(2, world));
    EXPECT_THAT(
        error_of([&] {
          manager.load_latest(
              target,
              LoadOptions().rename([](const std::string& name) -> std::string {
                throw std::runtime_error("no name for " + name);
              }));
        }),
        HasSubstr("no name for w"));
    EXPECT_EQ(diff_state_dicts(target, state_at(0, world)), "");
  });
}

TEST(CheckpointManagerTest, AnErrorOfAnAsyncSaveSurfacesAtTheNextCall) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    manager.save(1, state_at(1, world));
    set_file_fault([](FileOp op, const fs::path&) {
      return op == FileOp::Sync ? ENOSPC : 0;
    });
    manager.async_save(2, state_at(2, world));
    const std::string error =
        error_of([&] { manager.async_save(3, state_at(3, world)); });
    set_file_fault({});
    EXPECT_THAT(error, AllOf(HasSubstr("step_00000002"), HasSubstr("space")));
    EXPECT_EQ(manager.latest(), 1);
    manager.save(4, state_at(4, world)); // goes on
    EXPECT_EQ(manager.latest(), 4);
    EXPECT_THAT(
        names_in(folder / "c", world),
        ElementsAre("step_00000001", "step_00000004"));
  });
}

TEST(CheckpointManagerTest, DamagedOnesDoNotCountAndSoundOnesStay) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(1));
    manager.save(10, state_at(10, world));
    {
      Manager all(folder / "c", ManagerOptions().keep_last(0));
      all.save(20, state_at(20, world));
    }
    if (world.rank() == 0) {
      fs::resize_file(manager.path_of(20) / "__0_0.distcp", 100);
    }
    world.barrier();
    StateDict target = state_at(0, world);
    EXPECT_EQ(manager.load_latest(target), 10);
    manager.save(12, state_at(12, world));
    EXPECT_EQ(manager.latest(), 12);
    EXPECT_THAT(
        names_in(folder / "c", world),
        ElementsAre("step_00000012", "step_00000020.superseded"));
    manager.save(20, state_at(20, world)); // comes to it again
    EXPECT_EQ(manager.load_latest(target), 20);
  });
}

TEST(CheckpointManagerTest, ARunThatGoesBackLeavesItsPastAside) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(3));
    for (const int64_t step : {1, 2, 3, 4, 5}) {
      manager.save(step, state_at(step, world));
    }
    StateDict target = state_at(0, world);
    manager.load(3, target);
    manager.save(3, state_at(3, world));
    EXPECT_EQ(manager.latest(), 3);
    EXPECT_THAT(
        names_in(folder / "c", world),
        ElementsAre(
            "step_00000003",
            "step_00000004.superseded",
            "step_00000005.superseded"));
  });
}

TEST(CheckpointManagerTest, LeavesAloneWhatItDidNotWrite) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(1));
    if (world.rank() == 0) {
      testing::write_bytes(folder / "c" / "step_1", "mine");
      fs::create_directory(folder / "c" / "step_2");
      fs::create_directory(folder / "c" / "step_00000003");
      testing::write_bytes(
          folder / "c" / "step_00000003" / "notes.txt", "mine");
      fs::create_directory(folder / "c" / "step_00000099"); // above, too
    }
    world.barrier();
    StateDict target = state_at(0, world);
    manager.save(7, state_at(7, world));
    manager.save(8, state_at(8, world));
    EXPECT_EQ(manager.load_latest(target), 8);
    EXPECT_THAT(
        names_in(folder / "c", world),
        ElementsAre(
            "step_00000003",
            "step_00000008",
            "step_00000099",
            "step_1",
            "step_2"));
  });
}

TEST(CheckpointManagerTest, WhatCannotBeRemovedIsNoErrorOfTheSave) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c", ManagerOptions().keep_last(1));
    manager.save(1, state_at(1, world));
    set_file_fault([](FileOp op, const fs::path& path) {
      return op == FileOp::Remove && path.extension() == ".removed" ? EBUSY : 0;
    });
    manager.save(2, state_at(2, world));
    set_file_fault({});
    EXPECT_EQ(manager.latest(), 2);
    manager.save(3, state_at(3, world));
    EXPECT_THAT(names_in(folder / "c", world), ElementsAre("step_00000003"));
  });
}

TEST(CheckpointManagerTest, AFolderThatIsGoneIsToldOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    world.barrier();
    if (world.rank() == 0) {
      fs::remove_all(folder / "c");
    }
    world.barrier();
    EXPECT_THROW(manager.latest(), CheckpointError);
    StateDict target = state_at(0, world);
    EXPECT_THROW(manager.load_latest(target), CheckpointError);
    world.barrier(); // the group lives
  });
}

TEST(CheckpointManagerTest, RanksThatLoadDifferentStepsAreTold) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    manager.save(1, state_at(1, world));
    manager.save(2, state_at(2, world));
    StateDict target = state_at(0, world);
    EXPECT_THROW(manager.load(1 + world.rank(), target), DisagreementError);
    EXPECT_THROW(
        save(state_at(3, world), folder / std::to_string(world.rank())),
        DisagreementError);
  });
}

TEST(CheckpointManagerTest, RemovesWhatACrashLeft) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    if (world.rank() == 0) {
      fs::create_directory(folder / "c" / ".step_00000007.partial");
      fs::create_directory(folder / "c" / ".step_00000003.removed");
      testing::write_bytes(
          folder / "c" / ".step_00000003.removed" / "__0_0.distcp", "x");
      fs::create_directory(folder / "c" / "notes"); // not ours
    }
    world.barrier();
    EXPECT_EQ(manager.latest(), std::nullopt);
    manager.save(8, state_at(8, world));
    EXPECT_THAT(
        names_in(folder / "c", world), ElementsAre("notes", "step_00000008"));
  });
}

// ---- Beside a trainer that saves and removes --------------------------------

ManagerOptions alone(int64_t keep_last) {
  return ManagerOptions().keep_last(keep_last);
}

StateDict plain_state(int64_t step) {
  return {
      {"w", torch::full({10, 4}, static_cast<float>(step))}, {"step", step}};
}

enum class Moment { BeforeListing, BeforeOpening };

/// Calls `act` before a step's folder is listed, or the first file in it is
/// opened, for each of the first `times` steps.
class Intruder {
 public:
  Intruder(Moment moment, int times, std::function<void()> act) : left_(times) {
    set_file_fault(
        [this, moment, act = std::move(act)](FileOp op, const fs::path& path) {
          const bool is_folder = path.filename().string().starts_with("step_");
          const std::string step =
              (is_folder ? path : path.parent_path()).filename().string();
          if (op == FileOp::Open && step.starts_with("step_") &&
              is_folder == (moment == Moment::BeforeListing) && !is_inside_ &&
              left_ > 0 && is_new(step)) {
            is_inside_ = true;
            --left_;
            act();
            is_inside_ = false;
          }
          return 0;
        });
  }
  ~Intruder() {
    set_file_fault({});
  }
  Intruder(const Intruder&) = delete;
  Intruder& operator=(const Intruder&) = delete;

  int left() const {
    return left_;
  }

 private:
  bool is_new(const std::string& step) {
    const std::lock_guard lock(mutex_);
    return seen_.insert(step).second;
  }

  std::atomic<int> left_;
  std::atomic<bool> is_inside_ = false;
  std::mutex mutex_;
  std::set<std::string> seen_;
};

/// A trainer that keeps one checkpoint saves and removes whenever a step is
/// looked at.
template <class Look>
void check_beside_trainer(const Look& look) {
  for (const Moment moment : {Moment::BeforeListing, Moment::BeforeOpening}) {
    SCOPED_TRACE(static_cast<int>(moment));
    const TempFolder folder;
    Manager trainer(folder / "c", alone(1));
    Manager reader(folder / "c", alone(0));
    int64_t step = 10;
    trainer.save(step, plain_state(step));
    const Intruder intruder(moment, 4, [&] {
      step += 10;
      trainer.save(step, plain_state(step));
    });
    look(reader);
    EXPECT_EQ(intruder.left(), 0);
    EXPECT_EQ(step, 50);
  }
}

TEST(BesideATrainerTest, ListHasTheOneThatIsThere) {
  check_beside_trainer([](Manager& reader) {
    const auto entries = reader.list();
    ASSERT_EQ(entries.size(), 1U);
    EXPECT_EQ(entries[0].step, 50);
    EXPECT_EQ(entries[0].problem, "");
  });
}

TEST(BesideATrainerTest, LatestIsTheOneThatIsThere) {
  check_beside_trainer([](Manager& reader) { EXPECT_EQ(reader.latest(), 50); });
}

TEST(BesideATrainerTest, LoadLatestLoadsTheOneThatIsThere) {
  check_beside_trainer([](Manager& reader) {
    StateDict target = plain_state(0);
    EXPECT_EQ(reader.load_latest(target), 50);
    EXPECT_EQ(diff_state_dicts(target, plain_state(50)), "");
  });
}

/// A step is replaced, without RENAME_EXCHANGE, and looked at between the two
/// renames.
template <class Look>
void check_between_renames(const Look& look) {
  const TempFolder folder;
  Manager trainer(folder / "c", alone(1));
  Manager reader(folder / "c", alone(0));
  trainer.save(7, plain_state(1));
  int looks = 0;
  set_file_fault([&](FileOp op, const fs::path& path) {
    if (op == FileOp::Exchange) {
      return EINVAL;
    }
    if (op == FileOp::Rename && path.filename() == "step_00000007" &&
        !fs::exists(path)) {
      ++looks;
      look(reader);
    }
    return 0;
  });
  trainer.save(7, plain_state(2));
  set_file_fault({});
  EXPECT_EQ(looks, 1);
  StateDict target = plain_state(0);
  EXPECT_EQ(reader.load_latest(target), 7);
  EXPECT_EQ(diff_state_dicts(target, plain_state(2)), "");
  EXPECT_THAT(testing::names_in(folder / "c"), ElementsAre("step_00000007"));
}

TEST(BesideATrainerTest, AStepIsThereWhileItIsReplaced) {
  check_between_renames([](Manager& reader) {
    EXPECT_EQ(reader.latest(), 7);
    ASSERT_EQ(reader.list().size(), 1U);
    EXPECT_EQ(reader.list()[0].problem, "");
    StateDict target = plain_state(0);
    EXPECT_EQ(reader.load_latest(target), 7);
    EXPECT_EQ(diff_state_dicts(target, plain_state(1)), "");
  });
}

TEST(BesideATrainerTest, ARunThatWasKilledBetweenTheRenamesGoesOn) {
  const TempFolder folder;
  {
    Manager trainer(folder / "c", alone(2));
    trainer.save(7, plain_state(7));
    trainer.save(8, plain_state(8));
  }
  fs::rename(
      folder / "c" / "step_00000008", folder / "c" / ".step_00000008.old");
  Manager trainer(folder / "c", alone(2));
  StateDict target = plain_state(0);
  EXPECT_EQ(trainer.load_latest(target), 8);
  EXPECT_EQ(diff_state_dicts(target, plain_state(8)), "");
  trainer.save(9, plain_state(9));
  EXPECT_THAT(
      testing::names_in(folder / "c"),
      ElementsAre("step_00000008", "step_00000009"));
}

// Ranks that look at different folders of one name start again.
TEST(BesideATrainerTest, RanksLoadTheSameOneWhileItIsReplaced) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    Manager manager(folder / "c");
    manager.save(7, state_at(7, world));
    world.barrier();
    const Group self = world.alone();
    bool is_done = false;
    if (world.rank() == 1) { // opens it after another process has replaced it
      set_file_fault([&](FileOp op, const fs::path&) {
        if (op == FileOp::Open && !is_done) {
          is_done = true;
          save(
              {{"w", torch::full({10, 4}, 8.0)}, {"step", 8}, {"more", 1}},
              manager.path_of(7),
              SaveOptions().group(self).overwrite(true));
        }
        return 0;
      });
    }
    StateDict target = state_at(0, world);
    EXPECT_EQ(manager.load_latest(target, LoadOptions().strict(false)), 7);
    set_file_fault({});
    EXPECT_EQ(diff_state_dicts(target, state_at(8, world)), "");
  });
}

TEST(BesideATrainerTest, NeverSaysNoneInManyRounds) {
  const TempFolder folder;
  Manager reader(folder / "c", alone(0));
  std::atomic<bool> ends = false;
  std::promise<void> first;
  std::thread training([&] {
    Manager trainer(folder / "c", alone(1));
    for (int64_t step = 1; !ends; ++step) {
      trainer.save(step, plain_state(step));
      if (step == 1) {
        first.set_value();
      }
    }
  });
  first.get_future().wait();
  int64_t last = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(reader.list().empty());
    const auto latest = reader.latest();
    EXPECT_TRUE(latest.has_value());
    EXPECT_GE(latest.value_or(0), last);
    last = latest.value_or(last);
    StateDict target = plain_state(0);
    const auto loaded = reader.load_latest(target);
    EXPECT_TRUE(loaded.has_value());
    EXPECT_EQ(diff_state_dicts(target, plain_state(loaded.value_or(0))), "");
  }
  ends = true;
  training.join();
}

TEST(CheckpointManagerTest, OneThatCannotBeRemovedDoesNotStopPruning) {
  const TempFolder folder;
  Manager all(folder / "c", alone(0));
  for (const int64_t step : {1, 2, 3, 4}) {
    all.save(step, plain_state(step));
  }
  fs::create_directory(folder / "c" / ".step_00000000.removed");
  Manager manager(folder / "c", alone(1));
  set_file_fault([](FileOp op, const fs::path& path) {
    const std::string name = path.filename().string();
    const bool is_stuck =
        (op == FileOp::Remove && name == ".step_00000000.removed") ||
        (op == FileOp::Rename && name == ".step_00000003.removed") ||
        (op == FileOp::Remove && name == ".step_00000002.removed");
    return is_stuck ? EPERM : 0;
  });
  manager.save(5, plain_state(5));
  manager.save(6, plain_state(6));
  EXPECT_THAT(
      testing::names_in(folder / "c"),
      ElementsAre(
          ".step_00000000.removed",
          ".step_00000002.removed",
          "step_00000003",
          "step_00000006"));
  // Its name is taken when it is to go a second time.
  all.save(2, plain_state(2));
  manager.save(7, plain_state(7));
  set_file_fault({});
  EXPECT_THAT(
      testing::names_in(folder / "c"),
      ElementsAre(
          ".step_00000000.removed",
          ".step_00000002.removed",
          "step_00000003.superseded",
          "step_00000006.superseded",
          "step_00000007"));
}

} // namespace
} // namespace tessera::checkpoint
