// Saving on some ranks and loading on others, in whatever pieces.
#include <tessera/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

using checkpoint::LoadOptions;
using checkpoint::SaveOptions;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr Cut kCuts[] =
    {Cut::Whole, Cut::Rows, Cut::Columns, Cut::Flat, Cut::Last};

struct Named {
  std::string name;
  at::Tensor whole;
};

/// Tensors of many kinds, the same on all ranks.
std::vector<Named> tensors() {
  torch::manual_seed(5);
  std::vector<Named> result{
      {"matrix", torch::randn({7, 5})},
      {"double", torch::randn({6, 3}, torch::kDouble)},
      {"half", torch::randn({4, 9}).to(torch::kHalf)},
      {"bfloat16", torch::randn({5, 2}).to(torch::kBFloat16)},
      {"vector", torch::randn({11})},
      {"three", torch::randn({3, 4, 5})},
      {"long", torch::randint(-9, 9, {13}, torch::kLong)},
      {"byte", torch::randint(0, 255, {3, 3}, torch::kByte)},
      {"bool", torch::randint(0, 2, {10}).to(torch::kBool)},
      {"complex", torch::randn({2, 3}, torch::kComplexFloat)},
      {"empty", torch::zeros({0, 3})},
      {"row.with.dots", torch::randn({1, 4})},
  };
  return result;
}

StateDict state_of(Cut how, const Group& group, bool is_blank) {
  StateDict model;
  for (const Named& tensor : tensors()) {
    const Cut own =
        tensor.whole.dim() == 3 && how == Cut::Flat ? Cut::Rows : how;
    const StateValue value = cut(tensor.whole, own, group);
    model.set(tensor.name, is_blank ? blank(value) : value);
  }
  StateDict state{
      {"model", model},
      {"step", is_blank ? 0 : 1234},
      {"scalar", torch::tensor(is_blank ? 0.0F : 0.25F)},
      {"nested",
       StateDict{
           {"list", StateList{1, 2.5, "three", true, nullptr}},
           {"mixed",
            StateList{
                StateDict{{"lr", is_blank ? 0.0 : 0.1}},
                torch::full({2}, is_blank ? 0 : 3)}}}},
      {"ids", StateDict{{7, is_blank ? "" : "seven"}}}};
  return state;
}

/// This rank's view of a state, for comparisons.
std::string difference(const StateDict& a, const StateDict& b) {
  return diff_state_dicts(a, b);
}

TEST(CheckpointTest, EveryCutLoadsIntoEveryOtherOnAnyNumberOfRanks) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    std::vector<Group> groups; // of 1, 2, 3 and 4 ranks
    for (int size = 1; size <= 4; ++size) {
      std::vector<int> ranks(static_cast<size_t>(size));
      std::iota(ranks.begin(), ranks.end(), 0);
      const auto group = world.subgroup(ranks);
      groups.push_back(group ? *group : Group());
    }
    for (const Cut from : kCuts) {
      for (int size = 1; size <= 4; ++size) {
        const Group& group = groups[static_cast<size_t>(size - 1)];
        const auto path = folder /
            ("cut" + std::to_string(static_cast<int>(from)) + "_" +
             std::to_string(size));
        if (group.valid()) {
          checkpoint::save(
              state_of(from, group, false), path, SaveOptions().group(group));
        }
        world.barrier();
        for (const Cut to : kCuts) {
          for (const Group& target : groups) {
            if (!target.valid()) {
              continue;
            }
            StateDict state = state_of(to, target, true);
            checkpoint::load(state, path, LoadOptions().group(target));
            ASSERT_EQ(difference(state, state_of(to, target, false)), "")
                << "from cut " << static_cast<int>(from) << " on " << size
                << " to cut " << static_cast<int>(to) << " on "
                << target.size();
          }
        }
        world.barrier();
      }
    }
  });
}

TEST(CheckpointTest, ReadsAllOfItInOneProcess) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    checkpoint::save(state_of(Cut::Flat, world, false), folder / "c");
    const StateDict state = checkpoint::read(folder / "c");
    for (const Named& tensor : tensors()) {
      EXPECT_TRUE(torch::equal(
          state.at("model").dict().at(tensor.name).tensor(), tensor.whole))
          << tensor.name;
    }
    EXPECT_EQ(state.at("step").to_int(), 1234);
    EXPECT_EQ(state.at_path("nested.list.2").string(), "three");
    EXPECT_EQ(state.at_path("nested.mixed.0.lr").to_double(), 0.1);
    EXPECT_EQ(state.at_path("ids.7").string(), "seven");
  });
}

TEST(CheckpointTest, WhatAllRanksHaveIsWrittenOnceAndSpread) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    StateDict state;
    for (int i = 0; i < 16; ++i) {
      state.set("t" + std::to_string(i), torch::full({1 << 16}, float(i)));
    }
    checkpoint::save(state, folder / "c");
    const auto names = names_in(folder / "c");
    uint64_t total = 0;
    for (int rank = 0; rank < 4; ++rank) {
      uint64_t bytes = 0;
      for (const std::string& name : names) {
        if (name.rfind("__" + std::to_string(rank) + "_", 0) == 0) {
          bytes += fs::file_size(folder / "c" / name);
        }
      }
      EXPECT_GE(bytes, 4 * (1 << 18)); // a quarter
      total += bytes;
    }
    EXPECT_LT(total, 16 * ((1 << 18) + 4000));
  });
}

TEST(CheckpointTest, ALargeTensorOfAllRanksIsSharedOut) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const at::Tensor large = torch::arange(20 << 20, torch::kInt); // 80 MB
    checkpoint::save({{"large", large}}, folder / "c");
    for (const int rank : {0, 1}) {
      EXPECT_GT(
          fs::file_size(
              folder / "c" / ("__" + std::to_string(rank) + "_0.distcp")),
          10U << 20);
    }
    StateDict target{{"large", torch::empty({20 << 20}, torch::kInt)}};
    checkpoint::load(target, folder / "c");
    EXPECT_TRUE(torch::equal(target.at("large").tensor(), large));
  });
}

TEST(CheckpointTest, KeysMayDifferBetweenRanks) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    const std::string mine = "rank" + std::to_string(world.rank());
    checkpoint::save(
        {{"rng",
          StateDict{{mine, torch::full({2}, world.rank(), torch::kLong)}}}},
        folder / "c");
    const StateDict state = checkpoint::read(folder / "c");
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(
          state.at_path("rng.rank" + std::to_string(rank))
              .tensor()[0]
              .item<int64_t>(),
          rank);
    }
  });
}

TEST(CheckpointTest, SavesTensorsOfAnyStrides) {
  const TempFolder folder;
  const at::Tensor base = torch::randn({6, 8});
  const StateDict state{
      {"transposed", base.t()},
      {"steps", base.slice(1, 0, 8, 3)},
      {"conj", torch::randn({3}, torch::kComplexFloat).conj()},
      {"offset", base[3]}};
  checkpoint::save(state, folder / "c");
  StateDict target;
  for (const auto& [key, value] : state) {
    target.set(key, torch::zeros_like(value.tensor()));
  }
  checkpoint::load(target, folder / "c");
  EXPECT_EQ(diff_state_dicts(target, state), "");
  // Also into tensors with strides.
  const at::Tensor wide = torch::zeros({8, 12});
  StateDict strided{{"transposed", wide.slice(1, 0, 12, 2)}};
  checkpoint::load(strided, folder / "c", LoadOptions().strict(false));
  EXPECT_TRUE(torch::equal(wide.slice(1, 0, 12, 2), base.t()));
  EXPECT_EQ(wide.slice(1, 1, 12, 2).abs().sum().item<float>(), 0);
}

TEST(CheckpointTest, NothingIsThereBeforeAndOnlyTheFolderAfter) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    checkpoint::save({{"a", torch::ones({3})}}, folder / "c");
    EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
    EXPECT_THAT(
        names_in(folder / "c"),
        ElementsAre(".checksums", ".metadata", "__0_0.distcp", "__1_0.distcp"));
  });
}

TEST(CheckpointTest, ReplacesOnlyWhenAsked) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const auto value = [&] {
      return checkpoint::read(folder / "c").at("v").to_int();
    };
    checkpoint::save({{"v", 1}}, folder / "c");
    EXPECT_THAT(
        error_of([&] {
          checkpoint::save({{"v", 2}}, folder / "c");
        }),
        AllOf(HasSubstr("has a checkpoint already"), HasSubstr("overwrite")));
    EXPECT_EQ(value(), 1);
    checkpoint::save({{"v", 3}}, folder / "c", SaveOptions().overwrite(true));
    EXPECT_EQ(value(), 3);
    EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
  });
}

TEST(CheckpointTest, RefusesToReplaceWhatIsNoCheckpoint) {
  const TempFolder folder;
  fs::create_directory(folder / "home");
  testing::write_bytes(folder / "home" / "thesis.tex", "years of work");
  EXPECT_THAT(
      error_of([&] {
        checkpoint::save(
            {{"v", 2}}, folder / "home", SaveOptions().overwrite(true));
      }),
      HasSubstr("not part of a checkpoint"));
  EXPECT_THAT(names_in(folder / "home"), ElementsAre("thesis.tex"));
}

TEST(CheckpointTest, AnEmptyFolderMayBeThere) {
  const TempFolder folder;
  fs::create_directory(folder / "c");
  checkpoint::save({{"v", 2}}, folder / "c");
  EXPECT_EQ(checkpoint::read(folder / "c").at("v").to_int(), 2);
}

/// As another program writes it: {"w": 20,000 times `value`}.
void write_safetensors(const fs::path& path, float value) {
  const std::string header =
      R"({"w":{"dtype":"F32","shape":[200,100],"data_offsets":[0,80000]}})";
  const uint64_t size = header.size(); // hosts here are little-endian
  const std::vector<float> values(20000, value);
  fs::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof size);
  file << header;
  file.write(
      reinterpret_cast<const char*>(values.data()),
      static_cast<std::streamsize>(values.size() * sizeof(float)));
}

/// A file of another program has no checksums: hosts may have files of the same
/// sizes and other weights.
TEST(CheckpointTest, FilesWithoutChecksumsThatDifferBetweenRanksAreRefused) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    for (const bool differ : {true, false}) {
      const auto own = folder /
          ((differ ? "other" : "same") + std::to_string(world.rank())) /
          "model.safetensors";
      write_safetensors(own, differ ? static_cast<float>(world.rank()) : 1);
      StateDict target{{"w", torch::zeros({200, 100})}};
      const std::string error =
          error_of([&] { checkpoint::load(target, own); });
      if (differ) {
        EXPECT_THAT(error, HasSubstr("ranks were given different things"));
      } else {
        EXPECT_EQ(error, "nothing was thrown");
      }
    }
  });
}

TEST(CheckpointTest, TellsOnEveryRankWhatRanksDisagreeAbout) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    const int64_t rank = world.rank();
    EXPECT_THAT(
        error_of([&] {
          checkpoint::save({{"w", torch::ones({2 + rank / 2})}}, folder / "c");
        }),
        AllOf(HasSubstr("\"w\""), HasSubstr("rank 2"), HasSubstr("[3]")));
    EXPECT_THAT(
        error_of([&] {
          checkpoint::save({{"loss", rank}}, folder / "c");
        }),
        AllOf(HasSubstr("\"loss\""), HasSubstr("different values")));
    EXPECT_THAT(
        error_of([&] {
          const at::Tensor whole = torch::ones({6, 2});
          auto pieces = cut(whole, Cut::Rows, world).sharded().pieces();
          if (rank == 1) {
            pieces.clear();
          }
          checkpoint::save(
              {{"w",
                ShardedTensor({6, 2}, at::kFloat, std::move(pieces), world)}},
              folder / "c");
        }),
        AllOf(HasSubstr("\"w\""), HasSubstr("cover 8 of 12")));
    EXPECT_THAT(names_in(folder.path()), IsEmpty());
  });
}

TEST(CheckpointTest, RefusesWhatItCannotWrite) {
  const TempFolder folder;
  const auto error_saving = [&](const StateValue& value) {
    return error_of([&] { checkpoint::save({{"x", value}}, folder / "c"); });
  };
  EXPECT_THAT(error_saving(at::Tensor()), HasSubstr("not defined"));
  EXPECT_THAT(
      error_saving(torch::ones({2, 2}).to_sparse()), HasSubstr("to_dense"));
  EXPECT_THAT(
      error_saving(torch::empty({2}, torch::kMeta)), HasSubstr("no values"));
  EXPECT_THAT(
      error_of([&] {
        checkpoint::save({{"v", 1}}, folder / "no" / "c");
      }),
      AllOf(HasSubstr("no"), HasSubstr("Create it")));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(CheckpointTest, NamesAllThatDoesNotFitAndLoadsNothing) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    checkpoint::save(
        {{"model",
          StateDict{
              {"fc.weight", torch::ones({2, 3})},
              {"fc.bias", torch::ones({2})},
              {"norm", torch::ones({2})},
              {"step", 3}}},
         {"optim", StateDict{{"lr", 0.5}}}},
        folder / "c");
    const at::Tensor kept = torch::zeros({2});
    StateDict target{
        {"model",
         StateDict{
             {"fc.weihgt", torch::zeros({2, 3})},
             {"fc.bias", torch::zeros({3})},
             {"norm", kept},
             {"step", torch::zeros({1})}}}};
    const std::string error =
        error_of([&] { checkpoint::load(target, folder / "c"); });
    EXPECT_THAT(error, HasSubstr((folder / "c").string()));
    EXPECT_THAT(
        error,
        HasSubstr(
            "\"model.fc.weihgt\" is not in the checkpoint. Did you mean \"model.fc.weight\"?"));
    EXPECT_THAT(
        error, HasSubstr("\"model.fc.weight\" is in the checkpoint only"));
    EXPECT_THAT(
        error,
        HasSubstr(
            "\"model.fc.bias\": the checkpoint has float32 [2], the target float32 [3]"));
    EXPECT_THAT(error, HasSubstr("\"model.step\""));
    EXPECT_THAT(error, Not(HasSubstr("optim"))); // left out as a whole
    EXPECT_EQ(kept.sum().item<float>(), 0);
  });
}

TEST(CheckpointTest, SaysWhichPartANameIsIn) {
  const TempFolder folder;
  checkpoint::save(
      {{"model", StateDict{{"fc.weight", torch::ones({2})}}}}, folder / "c");
  StateDict target{{"fc.weight", torch::zeros({2})}};
  EXPECT_THAT(
      error_of([&] { checkpoint::load(target, folder / "c"); }),
      HasSubstr("There is \"model.fc.weight\": add \"model.\""));
}

TEST(CheckpointTest, NamesAValueThatCannotBeSaved) {
  const TempFolder folder;
  EXPECT_THAT(
      error_of([&] {
        checkpoint::save({{"text", "\xff\xfe"}}, folder / "c");
      }),
      AllOf(HasSubstr("\"text\""), HasSubstr("cannot be saved")));
  fs::create_directory(folder / "real");
  fs::create_directory_symlink(folder / "real", folder / "link");
  EXPECT_THAT(
      error_of([&] {
        checkpoint::save({{"v", 1}}, folder / "link");
      }),
      HasSubstr("symbolic link"));
}

TEST(CheckpointTest, LoadsWhatFitsWithoutStrict) {
  const TempFolder folder;
  checkpoint::save(
      {{"a", torch::ones({2})}, {"b", torch::ones({2})}}, folder / "c");
  StateDict target{{"a", torch::zeros({2})}, {"z", torch::zeros({2})}};
  const auto report =
      checkpoint::load(target, folder / "c", LoadOptions().strict(false));
  EXPECT_THAT(report.missing, ElementsAre("z"));
  EXPECT_THAT(report.unexpected, ElementsAre("b"));
  EXPECT_EQ(report.bytes_read, 8);
  EXPECT_EQ(target.at("a").tensor().sum().item<float>(), 2);
  EXPECT_EQ(target.at("z").tensor().sum().item<float>(), 0);
}

TEST(CheckpointTest, CastsOnRequest) {
  const TempFolder folder;
  const at::Tensor value = torch::randn({300, 7});
  checkpoint::save({{"a", value}}, folder / "c");
  StateDict target{{"a", torch::zeros({300, 7}, torch::kBFloat16)}};
  EXPECT_THAT(
      error_of([&] { checkpoint::load(target, folder / "c"); }),
      AllOf(HasSubstr("bfloat16"), HasSubstr("cast(true)")));
  EXPECT_EQ(target.at("a").tensor().abs().sum().item<float>(), 0);
  checkpoint::load(target, folder / "c", LoadOptions().cast(true));
  EXPECT_TRUE(
      torch::equal(target.at("a").tensor(), value.to(torch::kBFloat16)));
}

TEST(CheckpointTest, RenamesAndFilters) {
  const TempFolder folder;
  checkpoint::save(
      {{"old", StateDict{{"a", torch::ones({2})}, {"b", torch::ones({2})}}}},
      folder / "c");
  StateDict target{
      {"new", StateDict{{"a", torch::zeros({2})}, {"b", torch::zeros({2})}}}};
  checkpoint::load(
      target,
      folder / "c",
      LoadOptions()
          .rename(
              [](const std::string& name) { return "old" + name.substr(3); })
          .filter([](const std::string& name) { return name == "new.a"; }));
  EXPECT_EQ(target.at_path("new.a").tensor().sum().item<float>(), 2);
  EXPECT_EQ(target.at_path("new.b").tensor().sum().item<float>(), 0);
}

TEST(CheckpointTest, SaysWhatAPathIsThatIsNoCheckpoint) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    StateDict target{{"a", torch::zeros({2})}};
    const auto error_loading = [&](const fs::path& path) {
      return error_of([&] { checkpoint::load(target, path); });
    };
    EXPECT_THAT(
        error_loading(folder / "nowhere"),
        HasSubstr((folder / "nowhere").string()));
    if (world.rank() == 0) {
      fs::create_directory(folder / "empty");
      testing::write_bytes(folder / "text", "hello");
    }
    world.barrier();
    EXPECT_THAT(
        error_loading(folder / "empty"),
        HasSubstr((folder / "empty").string()));
    EXPECT_THAT(
        error_loading(folder / "text"), HasSubstr((folder / "text").string()));
  });
}

TEST(CheckpointTest, ProgressReachesTheTotal) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    StateDict state{
        {"a", cut(torch::randn({64, 64}), Cut::Rows, world)},
        {"b", cut(torch::randn({64, 64}), Cut::Rows, world)}};
    uint64_t done = 0;
    uint64_t total = 0;
    const auto progress = [&](uint64_t d, uint64_t t) {
      EXPECT_GT(d, done);
      done = d;
      total = t;
    };
    checkpoint::save(state, folder / "c", SaveOptions().progress(progress));
    EXPECT_EQ(done, 2 * 32 * 64 * 4);
    EXPECT_EQ(done, total);
    done = 0;
    checkpoint::load(state, folder / "c", LoadOptions().progress(progress));
    EXPECT_EQ(done, 2 * 32 * 64 * 4);
    EXPECT_EQ(done, total);
  });
}

TEST(CheckpointTest, ManyFilesAndThreads) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const StateDict state = state_of(Cut::Rows, world, false);
    checkpoint::save(state, folder / "c", SaveOptions().files_per_rank(3));
    EXPECT_TRUE(fs::exists(folder / "c" / "__1_2.distcp"));
    StateDict target = state_of(Cut::Columns, world, true);
    checkpoint::load(target, folder / "c", LoadOptions().threads(3));
    EXPECT_EQ(
        diff_state_dicts(target, state_of(Cut::Columns, world, false)), "");
  });
}

} // namespace
} // namespace tessera
