#include <tessera/checkpoint/manager.h>
#include <tessera/error.h>

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "base/byte_stream.h"
#include "base/byte_vector.h"
#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/partial_folder.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/peers.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kAside = ".old";
constexpr const char* kRemoved = ".removed";

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

std::string name_of_step(int64_t step) {
  return fmt::format("{}{:08}", kPrefix, step);
}

/// The step whose folder has exactly this name; nothing for other names.
std::optional<int64_t> step_named(const std::string& name) {
  const auto step = step_of(name);
  return step && name == name_of_step(*step) ? step : std::nullopt;
}

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

/// A folder at one moment. Another folder of the same name has another
/// identity, and so does a folder that was renamed.
struct Identity {
  fs::path path;
  dev_t device = 0;
  ino_t number = 0;
  int64_t seconds = 0; // of its last change
  int64_t nanoseconds = 0;

  bool operator==(const Identity&) const = default;
};

std::optional<Identity> identity_of(const fs::path& folder) {
  struct stat found {};
  if (::stat(folder.c_str(), &found) < 0 || !S_ISDIR(found.st_mode)) {
    return std::nullopt;
  }
  return Identity{
      folder,
      found.st_dev,
      found.st_ino,
      found.st_mtim.tv_sec,
      found.st_mtim.tv_nsec};
}

/// The folder of a step that may be in the middle of being replaced: see [Note:
/// replacing a folder].
std::optional<Identity> find_step(const fs::path& path) {
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

/// Names in a folder; nothing if the folder does not exist or no longer exists.
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

/// Whether a save has left files here, complete or not.
bool is_ours(const fs::path& folder) {
  const auto names = names_in(folder);
  return names &&
      std::any_of(names->begin(), names->end(), [](const fs::path& name) {
           return name == ".metadata" || name == kChecksumsName ||
               name.extension() == ".distcp";
         });
}

struct Step {
  int64_t step = 0;
  fs::path path; // its folder has, or is about to get, this name
  Identity found; // when it was listed

  bool has_changed() const {
    return find_step(path) != found;
  }
};

/// Checkpoints whose name is exactly that of a step, sorted by step. Includes
/// damaged checkpoints and those that are being replaced.
std::vector<Step> steps_in(const fs::path& folder) {
  const auto names = names_in(folder);
  if (!names) {
    fail_to_list(folder, ENOENT);
  }
  std::set<int64_t> seen;
  std::vector<Step> steps;
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

/// [Note: beside a trainer]
///
/// A trainer may save and remove checkpoints while another process looks for
/// them. A checkpoint that was listed may be gone when it is opened, and a list
/// that is made while entries come and go may lack both the new one and the old
/// one. So a reader that finds a checkpoint changed since it was listed lists
/// again, and an empty list counts only if the folder did not change while the
/// list was made. This may repeat without limit, but each time the trainer has
/// saved another checkpoint.
std::vector<Step> settled_steps_in(const fs::path& folder) {
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

/// Nothing if the checkpoint has been replaced or removed since it was listed.
std::optional<std::string> problem_with(const Step& step) {
  std::string problem = problem_with(step.path);
  if (!problem.empty() && step.has_changed()) {
    return std::nullopt;
  }
  return problem;
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

/// Removes what earlier removals did not finish and what processes that died
/// left behind: unfinished saves, and steps that were being replaced.
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

/// [Note: a run that goes back]
///
/// Steps above the one that was just saved belong to a past that the run has
/// abandoned: it was told to load an older step, or skipped damaged ones. They
/// must no longer be the latest, but they are not ours to remove.
void set_aside_above(const fs::path& folder, int64_t saved) {
  for (const Step& step : steps_in(folder)) {
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

/// The newest sound checkpoint; -1 if there is none.
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

/// The steps that rank 0 lists, on every rank; `Step::found` is set on rank 0
/// only.
std::vector<Step> steps_of_root(const Peers& peers, const fs::path& folder) {
  std::vector<Step> steps;
  ByteWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      steps = settled_steps_in(folder);
      out.number(steps.size());
      for (const Step& step : steps) {
        out.number(static_cast<uint64_t>(step.step));
      }
    }
  });
  const Bytes bytes = peers.broadcast(out.take(), "checkpoints");
  ByteReader in(bytes);
  const uint64_t count = in.number();
  for (uint64_t i = 0; !peers.is_root() && i < count; ++i) {
    const auto step = static_cast<int64_t>(in.number());
    steps.push_back({step, folder / name_of_step(step), {}});
  }
  return steps;
}

/// Whether rank 0 now finds another checkpoint than it listed. Collective.
bool has_changed(const Peers& peers, const Step& step) {
  ByteWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      out.number(step.has_changed() ? 1 : 0);
    }
  });
  const Bytes bytes =
      peers.broadcast(out.take(), "does a checkpoint still exist");
  return ByteReader(bytes).number() != 0;
}

} // namespace

Manager::Manager(const fs::path& folder, const ManagerOptions& options)
    : folder_(fs::absolute(folder).lexically_normal()), options_(options) {
  const Peers peers(options_.group());
  settle(peers, [&] {
    if (peers.is_root()) {
      std::error_code error;
      fs::create_directories(folder_, error);
      if (error) {
        raise<CheckpointError>(
            {.call = "checkpoint::Manager", .path = folder_.native()},
            fmt::format("cannot make this folder: {}.", error.message()));
      }
    }
  });
  settle(peers, [&] {
    if (!fs::is_directory(folder_)) {
      raise<CheckpointError>(
          {.call = "checkpoint::Manager",
           .rank = peers.rank(),
           .path = folder_.native()},
          "rank 0 has this folder, but this rank does not see it. Use a file system that all hosts share.");
    }
  });
}

Manager::~Manager() = default;

fs::path Manager::path_of(int64_t step) const {
  if (step < 0) {
    raise<c10::ValueError>(
        {.call = "checkpoint::Manager"},
        fmt::format("step {} is negative. Count from 0.", step));
  }
  return folder_ / name_of_step(step);
}

SaveOptions Manager::save_options() const {
  return SaveOptions()
      .group(options_.group())
      .overwrite(true)
      .files_per_rank(options_.files_per_rank());
}

void Manager::save(int64_t step, const StateDict& state) {
  wait();
  checkpoint::save(state, path_of(step), save_options());
  prune(step);
}

void Manager::save(int64_t step, Stateful& state) {
  save(step, state.state_dict());
}

void Manager::async_save(int64_t step, const StateDict& state) {
  wait();
  under_way_ = checkpoint::async_save(state, path_of(step), save_options());
  to_prune_ = step;
}

void Manager::async_save(int64_t step, Stateful& state) {
  async_save(step, state.state_dict());
}

void Manager::wait() {
  const auto step = std::exchange(to_prune_, std::nullopt);
  under_way_.wait();
  under_way_ = {};
  if (step) {
    prune(*step);
  }
}

void Manager::protect(std::optional<int64_t> step) {
  if (step) {
    path_of(*step); // throws if the step is negative
  }
  protected_ = step;
}

void Manager::prune(int64_t saved) {
  if (!Peers(options_.group()).is_root()) {
    return;
  }
  // The checkpoint is complete: if an old one cannot be removed, that is not a
  // reason to stop.
  try {
    remove_leftovers(folder_);
    set_aside_above(folder_, saved);
    remove_old();
  } catch (const std::exception& error) {
    TORCH_WARN("checkpoint::Manager: old checkpoints stay: ", error.what());
  }
}

void Manager::remove_old() const {
  const auto keep = static_cast<size_t>(options_.keep_last());
  if (options_.keep_last() <= 0) {
    return;
  }
  const auto steps = steps_in(folder_);
  size_t num_sound = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (num_sound < keep) {
      num_sound += problem_with(step->path).empty() ? 1 : 0;
      continue; // a damaged one does not count, and may help to find the cause
    }
    if (options_.keep_every() > 0 && step->step % options_.keep_every() == 0) {
      continue;
    }
    if (step->step == protected_) {
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

std::vector<Manager::Entry> Manager::list() const {
  std::map<int64_t, std::pair<Identity, std::string>> known; // checked already
  while (true) {
    std::vector<Entry> entries;
    bool has_changed = false;
    for (const Step& step : settled_steps_in(folder_)) {
      const auto seen = known.find(step.step);
      if (seen == known.end() || seen->second.first != step.found) {
        auto problem = problem_with(step);
        if (!problem) {
          has_changed = true;
          break;
        }
        known[step.step] = {step.found, std::move(*problem)};
      }
      entries.push_back({step.step, step.path, known[step.step].second});
    }
    if (!has_changed) {
      return entries;
    }
  }
}

std::optional<int64_t> Manager::latest() const {
  const Peers peers(options_.group());
  ByteWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      out.number(static_cast<uint64_t>(newest_sound(folder_)));
    }
  });
  const Bytes bytes = peers.broadcast(out.take(), "the latest checkpoint");
  const auto step = static_cast<int64_t>(ByteReader(bytes).number());
  return step < 0 ? std::nullopt : std::optional(step);
}

template <class Target>
std::optional<int64_t> Manager::load_newest(
    Target& target,
    LoadOptions options) {
  wait();
  const Peers peers(options_.group());
  options.group(options_.group());
  // See [Note: beside a trainer].
  while (true) {
    bool must_list_again = false;
    std::string problems;
    const auto steps = steps_of_root(peers, folder_);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      try {
        checkpoint::load(target, step->path, options);
        return step->step;
      } catch (
          const DisagreementError&) { // ranks have seen different checkpoints
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          throw;
        }
      } catch (const CheckpointAccessError&) {
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          throw; // it may be sound: loading an older one would lose steps
        }
      } catch (const CheckpointError& error) { // on all ranks
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          problems += fmt::format("\n  {}", error.what_without_backtrace());
          if (peers.is_root()) {
            TORCH_WARN(
                "skipping a checkpoint: ", error.what_without_backtrace());
          }
        }
      }
      if (must_list_again) {
        break;
      }
    }
    if (must_list_again) {
      continue;
    }
    if (!problems.empty()) {
      raise<CheckpointError>(
          {.call = "load_latest", .path = folder_.native()},
          "no checkpoint here can be loaded:" + problems);
    }
    return std::nullopt;
  }
}

std::optional<int64_t> Manager::load_latest(
    StateDict& target,
    LoadOptions options) {
  return load_newest(target, std::move(options));
}

std::optional<int64_t> Manager::load_latest(
    Stateful& target,
    LoadOptions options) {
  return load_newest(target, std::move(options));
}

void Manager::load(int64_t step, StateDict& target, LoadOptions options) {
  wait();
  checkpoint::load(target, path_of(step), options.group(options_.group()));
}

void Manager::load(int64_t step, Stateful& target, LoadOptions options) {
  wait();
  checkpoint::load(target, path_of(step), options.group(options_.group()));
}

} // namespace tessera::checkpoint
