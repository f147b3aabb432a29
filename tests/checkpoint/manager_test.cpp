// The checkpoints of a run.
#include <tessera/checkpoint/manager.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "checkpoint/store/files.h"
#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::FileOp;
using ::testing::AllOf;
using testing::Cut;
using testing::cut;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_ranks;
using testing::TempFolder;

StateDict state_at(int64_t step, const Group& world) {
  return {
      {"w",
       cut(torch::full({10, 4}, static_cast<float>(step)), Cut::kRows, world)},
      {"step", step}};
}

/// What is in the folder when rank 0 has tidied up.
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
    CheckpointManager manager(
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
    EXPECT_EQ(diff(target, state_at(80, world)), "");
    manager.load(60, target);
    EXPECT_EQ(diff(target, state_at(60, world)), "");
  });
}

TEST(CheckpointManagerTest, AnEmptyFolderHasNothingToLoad) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c");
    StateDict target = state_at(5, world);
    EXPECT_EQ(manager.load_latest(target), std::nullopt);
    if (world.rank() == 0) { // a name that only looks like a step's
      std::filesystem::create_directories(folder / "c" / "step_-0000001");
    }
    world.barrier();
    EXPECT_EQ(manager.latest(), std::nullopt);
    EXPECT_EQ(manager.load_latest(target), std::nullopt);
    EXPECT_EQ(diff(target, state_at(5, world)), "");
    EXPECT_THAT(
        error_of([&] { manager.load(3, target); }), HasSubstr("step_00000003"));
  });
}

TEST(CheckpointManagerTest, PassesOverWhatIsDamagedWithAReason) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c", ManagerOptions().keep_last(0));
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
    EXPECT_EQ(diff(target, state_at(2, world)), "");
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
    CheckpointManager manager(folder / "c");
    manager.save(1, state_at(1, world));
    StateDict target{{"other", torch::zeros({2})}};
    EXPECT_THROW(manager.load_latest(target), c10::ValueError);
    // Nor is an error of the user's own damage.
    target = state_at(0, world);
    manager.save(2, state_at(2, world));
    EXPECT_THAT(
        error_of([&] {
          manager.load_latest(
              target,
              checkpoint::LoadOptions().rename(
                  [](const std::string& name) -> std::string {
                    throw std::runtime_error("no name for " + name);
                  }));
        }),
        HasSubstr("no name for w"));
    EXPECT_EQ(diff(target, state_at(0, world)), "");
  });
}

TEST(CheckpointManagerTest, AnErrorOfAnAsyncSaveSurfacesAtTheNextCall) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c");
    manager.save(1, state_at(1, world));
    checkpoint::set_file_fault([](FileOp op, const fs::path&) {
      return op == FileOp::kSync ? ENOSPC : 0;
    });
    manager.async_save(2, state_at(2, world));
    const std::string error =
        error_of([&] { manager.async_save(3, state_at(3, world)); });
    checkpoint::set_file_fault({});
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
    CheckpointManager manager(folder / "c", ManagerOptions().keep_last(1));
    manager.save(10, state_at(10, world));
    {
      CheckpointManager all(folder / "c", ManagerOptions().keep_last(0));
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
    CheckpointManager manager(folder / "c", ManagerOptions().keep_last(3));
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
    CheckpointManager manager(folder / "c", ManagerOptions().keep_last(1));
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
    CheckpointManager manager(folder / "c", ManagerOptions().keep_last(1));
    manager.save(1, state_at(1, world));
    checkpoint::set_file_fault([](FileOp op, const fs::path& path) {
      return op == FileOp::kRemove && path.extension() == ".removed" ? EBUSY
                                                                     : 0;
    });
    manager.save(2, state_at(2, world));
    checkpoint::set_file_fault({});
    EXPECT_EQ(manager.latest(), 2);
    manager.save(3, state_at(3, world));
    EXPECT_THAT(names_in(folder / "c", world), ElementsAre("step_00000003"));
  });
}

TEST(CheckpointManagerTest, AFolderThatIsGoneIsToldOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c");
    world.barrier();
    if (world.rank() == 0) {
      fs::remove_all(folder / "c");
    }
    world.barrier();
    EXPECT_THROW(manager.latest(), checkpoint::CheckpointError);
    StateDict target = state_at(0, world);
    EXPECT_THROW(manager.load_latest(target), checkpoint::CheckpointError);
    world.barrier(); // the group lives
  });
}

TEST(CheckpointManagerTest, RanksThatLoadDifferentStepsAreTold) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c");
    manager.save(1, state_at(1, world));
    manager.save(2, state_at(2, world));
    StateDict target = state_at(0, world);
    EXPECT_THROW(manager.load(1 + world.rank(), target), DisagreementError);
    EXPECT_THROW(
        checkpoint::save(
            state_at(3, world), folder / std::to_string(world.rank())),
        DisagreementError);
  });
}

TEST(CheckpointManagerTest, RemovesWhatACrashLeft) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    CheckpointManager manager(folder / "c");
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

} // namespace
} // namespace tessera
