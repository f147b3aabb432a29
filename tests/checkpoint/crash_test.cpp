// A process that dies, or a disk that refuses, at every point of a save: either
// the old checkpoint or the new one can be loaded completely.
#include <tessera/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <future>
#include <thread>

#include "checkpoint/disk/files.h"
#include "checkpoint/disk/partial_folder.h"
#include "checkpoint/support.h"
#include "support/command.h"
#include "support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::FileOp;
using checkpoint::SaveOptions;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::names_in;
using testing::TempFolder;

StateDict state(int64_t version) {
  return {
      {"a", torch::full({1000}, version)},
      {"b", torch::full({400, 700}, static_cast<float>(version))}, // > 1 block
      {"version", version}};
}

void save_state(const StateDict& state, const fs::path& path) {
  checkpoint::save(
      state, path, SaveOptions().overwrite(true).files_per_rank(1));
}

void save_version(const fs::path& path, int64_t version) {
  save_state(state(version), path);
}

/// The version that loads; throws unless all of it is one version.
int64_t load_version(const fs::path& path) {
  StateDict target = state(-1);
  checkpoint::load(target, path);
  const int64_t version = target.at("version").to_int();
  const std::string difference = diff_state_dicts(target, state(version));
  if (!difference.empty()) {
    throw std::runtime_error("a mixture: " + difference);
  }
  return version;
}

enum class FileSystem { Local, WithoutExchange };

/// How NFS and Lustre answer RENAME_EXCHANGE.
int refusal(FileSystem files, FileOp op) {
  return files == FileSystem::WithoutExchange && op == FileOp::Exchange ? EINVAL
                                                                        : 0;
}

/// The operations of a save that replaces a checkpoint, in order.
std::vector<FileOp> operations(
    const TempFolder& folder,
    FileSystem files = FileSystem::Local) {
  save_version(folder / "count", 1);
  std::vector<FileOp> ops;
  checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
    ops.push_back(op);
    return refusal(files, op);
  });
  save_version(folder / "count", 2);
  checkpoint::set_file_fault({});
  fs::remove_all(folder / "count");
  return ops;
}

/// Saves in a process of its own that kills itself at operation `point`; true
/// if it got that far. The child has none of LibTorch's threads, so `state` is
/// made in the parent.
bool dies_at(
    size_t point,
    const StateDict& state,
    const fs::path& path,
    FileSystem files = FileSystem::Local) {
  const pid_t child = ::fork();
  if (child == 0) {
    size_t count = 0;
    checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
      if (count++ == point) {
        ::raise(SIGKILL);
      }
      return refusal(files, op);
    });
    try {
      save_state(state, path);
    } catch (...) {
      ::_exit(2);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

TEST(CrashTest, ASaveHasEveryKindOfOperation) {
  const TempFolder folder;
  const auto ops = operations(folder);
  for (const FileOp op :
       {FileOp::MakeFolder,
        FileOp::Lock,
        FileOp::Create,
        FileOp::Write,
        FileOp::Sync,
        FileOp::SyncFolder,
        FileOp::Exchange,
        FileOp::Remove}) {
    EXPECT_NE(std::find(ops.begin(), ops.end(), op), ops.end()) << name_of(op);
  }
}

TEST(CrashTest, KilledAtEveryPointOfTheFirstSave) {
  const TempFolder folder;
  size_t point = 0;
  const StateDict first = state(1);
  while (dies_at(point, first, folder / "c")) {
    // Nothing, or a complete checkpoint.
    if (fs::exists(folder / "c")) {
      EXPECT_EQ(load_version(folder / "c"), 1) << "at operation " << point;
      fs::remove_all(folder / "c");
    }
    ++point;
  }
  EXPECT_GT(point, 8U);
  save_version(folder / "c", 2); // after whatever was left behind
  EXPECT_EQ(load_version(folder / "c"), 2);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
}

TEST(CrashTest, KilledAtEveryPointOfReplacing) {
  const TempFolder folder;
  save_version(folder / "c", 1);
  size_t point = 0;
  const StateDict second = state(2);
  while (dies_at(point, second, folder / "c")) {
    EXPECT_THAT(load_version(folder / "c"), AnyOf(1, 2))
        << "at operation " << point;
    if (load_version(folder / "c") == 2) { // the save was complete
      save_version(folder / "c", 1);
    }
    ++point;
  }
  EXPECT_GT(point, 10U);
  EXPECT_EQ(load_version(folder / "c"), 2);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
}

// Between the two renames there is no "c", only ".c.old".
TEST(CrashTest, KilledAtEveryPointOfReplacingWithoutExchange) {
  const TempFolder folder;
  save_version(folder / "c", 1);
  size_t point = 0;
  size_t num_aside = 0;
  const StateDict second = state(2);
  while (dies_at(point, second, folder / "c", FileSystem::WithoutExchange)) {
    SCOPED_TRACE("operation " + std::to_string(point));
    const bool is_aside = !fs::exists(folder / "c");
    num_aside += is_aside ? 1 : 0;
    const int64_t version = load_version(folder / "c");
    EXPECT_THAT(version, AnyOf(1, 2));
    if (is_aside) {
      EXPECT_EQ(version, 1);
      // A save that must not replace the old checkpoint finds it.
      EXPECT_THAT(
          error_of([&] { checkpoint::save(second, folder / "c"); }),
          HasSubstr("has a checkpoint already"));
      EXPECT_TRUE(fs::exists(folder / "c" / ".metadata"));
    }
    if (version == 2) { // the save was complete
      save_version(folder / "c", 1);
      EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
    }
    ++point;
  }
  EXPECT_GT(point, 10U);
  EXPECT_EQ(num_aside, 1U);
  EXPECT_EQ(load_version(folder / "c"), 2);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
}

TEST(CrashTest, TheOldOneGetsItsNameBackIfTheNewOneCannotHaveIt) {
  const TempFolder folder;
  save_version(folder / "c", 1);
  for (const bool back : {true, false}) {
    int renames = 0;
    checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
      if (op == FileOp::Rename && ++renames >= 2) {
        return renames == 2 || !back ? EIO : 0;
      }
      return refusal(FileSystem::WithoutExchange, op);
    });
    const std::string text = error_of([&] { save_version(folder / "c", 2); });
    checkpoint::set_file_fault({});
    EXPECT_THAT(text, HasSubstr(checkpoint::system_reason(EIO)));
    EXPECT_EQ(load_version(folder / "c"), 1);
    EXPECT_THAT(names_in(folder.path()), ElementsAre(back ? "c" : ".c.old"));
    if (!back) {
      EXPECT_THAT(text, HasSubstr(".c.old"));
    }
  }
}

/// Two saves on hosts that do not see each other's locks. The second begins
/// when the first has written its data, and has a data file of its own when the
/// first continues to its end.
struct TwoHosts {
  std::string first_error;
  std::string second_error;
  int64_t between = 0; // the version when the first has ended

  explicit TwoHosts(const fs::path& path) {
    std::promise<void> second_has_begun;
    std::promise<void> first_has_ended;
    std::atomic<int> num_creates = 0;
    const StateDict other = state(3);
    std::thread second;
    const auto save_second = [&] {
      second_error = error_of([&] { save_state(other, path); });
      if (num_creates < 3) {
        second_has_begun.set_value(); // it was refused
      }
    };
    checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
      if (op == FileOp::Lock) {
        return ENOLCK;
      }
      if (op != FileOp::Write && op != FileOp::Create) {
        return 0;
      }
      const int count = op == FileOp::Create ? ++num_creates : 0;
      if (count == 2) { // .checksums of the first
        checkpoint::PartialFolder::set_host_for_testing("bbbbbbbbbbbb");
        second = std::thread(save_second);
        second_has_begun.get_future().wait();
      } else if (op == FileOp::Write && num_creates == 3) {
        num_creates = 4; // data of the second
        second_has_begun.set_value();
        first_has_ended.get_future().wait();
      }
      return 0;
    });
    checkpoint::PartialFolder::set_host_for_testing("aaaaaaaaaaaa");
    first_error = error_of([&] { save_version(path, 2); });
    error_of([&] { between = load_version(path); });
    first_has_ended.set_value();
    second.join();
    checkpoint::set_file_fault({});
    checkpoint::PartialFolder::set_host_for_testing({});
  }
};

constexpr const char* kNoError = "nothing was thrown";

TEST(CrashTest, TwoHostsThatDoNotSeeEachOthersLocksMixNothing) {
  const TempFolder folder;
  {
    SCOPED_TRACE("a new one");
    const TwoHosts hosts(folder / "c");
    EXPECT_EQ(hosts.first_error, kNoError);
    EXPECT_EQ(hosts.between, 2);
    EXPECT_THAT(hosts.second_error, HasSubstr("cannot rename"));
    EXPECT_EQ(load_version(folder / "c"), 2);
  }
  {
    SCOPED_TRACE("one that is replaced");
    const TwoHosts hosts(folder / "c");
    EXPECT_EQ(hosts.first_error, kNoError);
    EXPECT_EQ(hosts.between, 2);
    EXPECT_EQ(hosts.second_error, kNoError);
    EXPECT_EQ(load_version(folder / "c"), 3);
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
}

// The save may still run, or its host may have crashed.
TEST(CrashTest, WhatAnotherHostIsWritingIsRemovedWhenItIsOld) {
  const TempFolder folder;
  const fs::path theirs =
      folder / ".c.partial" / "0123456789ab-0123456789abcdef";
  fs::create_directories(theirs);
  testing::write_bytes(theirs / "__0_0.distcp", "half");
  save_version(folder / "c", 1);
  EXPECT_EQ(testing::read_bytes(theirs / "__0_0.distcp"), "half");
  const auto old = fs::file_time_type::clock::now() - std::chrono::hours(2);
  fs::last_write_time(theirs / "__0_0.distcp", old);
  save_version(folder / "c", 2); // the folder itself is younger
  EXPECT_TRUE(fs::exists(theirs));
  fs::last_write_time(theirs, old);
  save_version(folder / "c", 3);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
}

void check_refusals(int error, FileSystem files = FileSystem::Local) {
  const TempFolder folder;
  const size_t num_points = operations(folder, files).size();
  save_version(folder / "c", 1);
  for (size_t point = 0; point < num_points; ++point) {
    SCOPED_TRACE("operation " + std::to_string(point));
    size_t count = 0;
    FileOp refused{};
    checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
      refused = count == point ? op : refused;
      return count++ == point ? error : refusal(files, op);
    });
    const std::string text = error_of([&] { save_version(folder / "c", 2); });
    checkpoint::set_file_fault({});
    EXPECT_THAT(text, HasSubstr(checkpoint::system_reason(error)));
    EXPECT_THAT(text, HasSubstr(folder.path().string()));
    const auto version = load_version(folder / "c");
    EXPECT_THAT(version, AnyOf(1, 2));
    EXPECT_EQ(version == 2, text.find("is in place") != std::string::npos);
    // Files that a crash of the system might bring back stay, too.
    const bool may_leave = refused == FileOp::Remove ||
        (refused == FileOp::SyncFolder && files == FileSystem::WithoutExchange);
    if (!may_leave) {
      EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
    }
    save_version(folder / "c", 1);
    EXPECT_THAT(names_in(folder.path()), ElementsAre("c"));
  }
}

TEST(CrashTest, ADiskThatIsFullAtEveryPoint) {
  check_refusals(ENOSPC);
  check_refusals(ENOSPC, FileSystem::WithoutExchange);
}

TEST(CrashTest, ADiskThatFailsAtEveryPoint) {
  check_refusals(EIO);
}

TEST(CrashTest, AReadOnlyFolder) {
  if (::geteuid() == 0) {
    // Root may write anywhere: a file system that is mounted read-only stands
    // in for it.
    const std::string error = error_of([] {
      checkpoint::save({{"v", 1}}, "/proc/checkpoint");
    });
    EXPECT_THAT(error, HasSubstr("/proc"));
    return;
  }
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
  const std::string error = error_of([&] {
    checkpoint::save({{"v", 1}}, folder / "c");
  });
  fs::permissions(folder.path(), fs::perms::owner_all);
  EXPECT_THAT(error, HasSubstr("this user may write"));
}

TEST(CrashTest, TwoJobsAtOnePlace) {
  const TempFolder folder;
  save_version(folder / "c", 1);
  // The second begins while the first is writing.
  std::string error;
  bool tried = false;
  checkpoint::set_file_fault([&](FileOp op, const fs::path&) {
    if (op == FileOp::Sync && !tried) {
      tried = true;
      error = error_of([&] { save_version(folder / "c", 3); });
    }
    return 0;
  });
  save_version(folder / "c", 2);
  checkpoint::set_file_fault({});
  EXPECT_THAT(error, HasSubstr("another save to"));
  EXPECT_EQ(load_version(folder / "c"), 2);
}

/// Ranks of a save, one of which dies; see crash_subject.cpp.
TEST(CrashTest, ARankThatDiesInASave) {
  // Rank 0 makes and names the folder; the others create, write and sync.
  const std::vector<std::vector<int>> points{
      {0, 5, 6, 7, 8, 9, 12, 14}, {0, 2}, {1}};
  for (size_t rank = 0; rank < points.size(); ++rank) {
    for (const int point : points[rank]) {
      SCOPED_TRACE(
          "rank " + std::to_string(rank) + " at " + std::to_string(point));
      const TempFolder folder;
      const auto result = testing::run_command(
          {testing::tessera_program(),
           "run",
           "-n",
           "3",
           testing::bin_dir() + "/crash_subject",
           folder.path().string(),
           std::to_string(rank),
           std::to_string(point)},
          {.environment = testing::without_launcher()});
      EXPECT_NE(result.exit_code, 0);
      EXPECT_FALSE(result.timed_out) << result.output;
      EXPECT_THAT(result.output, HasSubstr("first save done"));
      StateDict target{{"v", torch::zeros({30, 3})}, {"version", 0}};
      checkpoint::load(target, folder / "c");
      EXPECT_EQ(target.at("version").to_int(), 1);
      EXPECT_EQ(target.at("v").tensor().eq(1).all().item<bool>(), true);
    }
  }
}

} // namespace
} // namespace tessera
