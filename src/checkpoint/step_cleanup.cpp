#include "checkpoint/step_cleanup.h"

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <string>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/partial_folder.h"
#include "checkpoint/step_folders.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemoved = ".removed";

/// A name that is not in use yet: `path` with `ending`, and a number if needed.
fs::path unused(const fs::path& path, const std::string& ending) {
  fs::path name = path.string() + ending;
  for (int i = 2; fs::exists(fs::symlink_status(name)); ++i) {
    name = fmt::format("{}{}{}", path.string(), ending, i);
  }
  return name;
}

/// The name of a checkpoint while it is being removed.
fs::path doomed(const fs::path& path) {
  return unused(
      path.parent_path() / ("." + path.filename().string()), kRemoved);
}

/// Calls `body` and turns what it throws into a warning. Used where one failure
/// must not prevent the rest of the clean-up.
template <class Body>
void tolerating(const fs::path& path, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    TORCH_WARN(
        "checkpoint::Manager: ", path.string(), " stays: ", error.what());
  }
}

} // namespace

void remove_leftovers(const fs::path& folder) {
  for (const std::string& name :
       names_in(folder).value_or(std::vector<std::string>())) {
    if (name.rfind(".step_", 0) != 0) {
      continue;
    }
    const fs::path path = folder / name;
    tolerating(path, [&] {
      if (name.find(kRemoved) != std::string::npos) {
        remove_path(path);
      } else if (name.ends_with(".partial")) {
        PartialFolder::remove_if_stale(path);
      } else if (name.ends_with(kAside)) {
        FolderWriter::recover(
            folder / name.substr(1, name.size() - 1 - kAside.size()));
      }
    });
  }
}

void set_aside_above(const fs::path& folder, int64_t saved) {
  for (const StepFolder& step : steps_in(folder)) {
    if (step.step <= saved) {
      continue;
    }
    tolerating(step.path, [&] {
      const fs::path aside = unused(step.path, ".superseded");
      rename_path(step.path, aside);
      TORCH_WARN(
          "checkpoint::Manager: step ",
          saved,
          " was saved after step ",
          step.step,
          ", which is now ",
          aside.string());
    });
  }
}

void remove_old(const fs::path& folder, const KeptSteps& kept) {
  const auto keep = static_cast<size_t>(kept.last);
  if (kept.last <= 0) {
    return;
  }
  const auto steps = steps_in(folder);
  size_t num_sound = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (num_sound < keep) {
      num_sound += problem_with(step->path).empty() ? 1 : 0;
      continue; // a damaged one does not count, and may help to find the cause
    }
    if (kept.every > 0 && step->step % kept.every == 0) {
      continue;
    }
    if (step->step == kept.protected_step) {
      continue;
    }
    // Renamed first, so that nobody takes a half-removed folder for a complete
    // checkpoint.
    tolerating(step->path, [&] {
      const fs::path gone = doomed(step->path);
      rename_path(step->path, gone);
      remove_path(gone);
    });
  }
}

} // namespace tessera::checkpoint
