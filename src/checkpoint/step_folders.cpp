#include "checkpoint/step_folders.h"

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/error.h>

#include <sys/stat.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <set>
#include <thread>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";

/// The step of a name such as "step_00001000"; nothing for other names.
std::optional<int64_t> step_of(const std::string& name) {
  if (name.rfind(kPrefix, 0) != 0) {
    return std::nullopt;
  }
  int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] =
      std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && stop == end && step >= 0 ? std::optional(step)
                                                          : std::nullopt;
}

/// The step whose folder has exactly this name; nothing for other names.
std::optional<int64_t> step_named(const std::string& name) {
  const auto step = step_of(name);
  return step && name == name_of_step(*step) ? step : std::nullopt;
}

std::optional<FolderIdentity> identity_of(const fs::path& folder) {
  struct stat found {};
  if (::stat(folder.c_str(), &found) < 0 || !S_ISDIR(found.st_mode)) {
    return std::nullopt;
  }
  return FolderIdentity{
      folder,
      found.st_dev,
      found.st_ino,
      found.st_mtim.tv_sec,
      found.st_mtim.tv_nsec};
}

/// The folder of a step that may be in the middle of being replaced: see [Note:
/// replacing a folder].
std::optional<FolderIdentity> find_step(const fs::path& path) {
  if (auto found = identity_of(path)) {
    return found;
  }
  return identity_of(FolderWriter::aside_of(path));
}

[[noreturn]] void fail_to_list(const fs::path& folder, int error) {
  raise<CheckpointAccessError>(
      {.call = "checkpoint::Manager", .path = folder.native()},
      fmt::format("cannot list this folder: {}.", system_reason(error)));
}

/// Whether a save has left files here, complete or not.
bool is_ours(const fs::path& folder) {
  const auto names = names_in(folder);
  return names &&
      std::any_of(names->begin(), names->end(), [](const fs::path& name) {
           return name == ".metadata" || name == kChecksumsName ||
               name.extension() == ".distcp";
         });
}

} // namespace

std::string name_of_step(int64_t step) {
  return fmt::format("{}{:08}", kPrefix, step);
}

bool StepFolder::has_changed() const {
  return find_step(path) != found;
}

std::optional<std::vector<std::string>> names_in(const fs::path& folder) {
  if (const int error = opening_fault(folder)) {
    fail_to_list(folder, error);
  }
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error == std::errc::no_such_file_or_directory ||
      error.value() == ESTALE) {
    return std::nullopt;
  }
  if (error) {
    fail_to_list(folder, error.value());
  }
  return names;
}

std::vector<StepFolder> steps_in(const fs::path& folder) {
  const auto names = names_in(folder);
  if (!names) {
    fail_to_list(folder, ENOENT);
  }
  std::set<int64_t> seen;
  std::vector<StepFolder> steps;
  for (const std::string& name : *names) {
    const bool is_aside = name.starts_with('.') && name.ends_with(kAside);
    const auto step = step_named(
        is_aside ? name.substr(1, name.size() - 1 - kAside.size()) : name);
    if (!step || seen.contains(*step)) {
      continue;
    }
    const fs::path path = folder / name_of_step(*step);
    const auto found = find_step(path);
    if (found && is_ours(found->path)) {
      seen.insert(*step);
      steps.push_back({*step, path, *found});
    }
  }
  std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) {
    return a.step < b.step;
  });
  return steps;
}

std::vector<StepFolder> settled_steps_in(const fs::path& folder) {
  // Longer than the resolution of a file system's timestamps: a change after
  // the pause gets a timestamp that differs from the one before it.
  constexpr auto kPause = std::chrono::milliseconds(20);
  while (true) {
    auto steps = steps_in(folder);
    if (!steps.empty()) {
      return steps;
    }
    const auto before = identity_of(folder);
    std::this_thread::sleep_for(kPause);
    steps = steps_in(folder);
    if (!steps.empty() || before == identity_of(folder)) {
      return steps;
    }
  }
}

std::string problem_with(const fs::path& path) {
  try {
    Source::open(path);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::optional<std::string> problem_with(const StepFolder& step) {
  std::string problem = problem_with(step.path);
  if (!problem.empty() && step.has_changed()) {
    return std::nullopt;
  }
  return problem;
}

int64_t newest_sound(const fs::path& folder) {
  while (true) {
    const auto steps = settled_steps_in(folder);
    bool has_changed = false;
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      const auto problem = problem_with(*step);
      if (problem && problem->empty()) {
        return step->step;
      }
      if (!problem) {
        has_changed = true;
        break;
      }
    }
    if (!has_changed) {
      return -1;
    }
  }
}

} // namespace tessera::checkpoint
