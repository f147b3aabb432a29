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
#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/partial_folder.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/peers.h"

namespace tessera {

namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointError;
using checkpoint::LoadOptions;
using checkpoint::Peers;

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kAside = ".old";
constexpr const char* kRemoved = ".removed";

/// The step of "step_00001000"; nothing for other names.
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

/// The step whose folder has this name, exactly; nothing for other names.
std::optional<int64_t> step_named(const std::string& name) {
  const auto step = step_of(name);
  return step && name == name_of_step(*step) ? step : std::nullopt;
}

/// A folder that nothing is called yet: `path` with `ending`, or a number more.
fs::path unused(const fs::path& path, const std::string& ending) {
  fs::path name = path.string() + ending;
  for (int i = 2; fs::exists(fs::symlink_status(name)); ++i) {
    name = fmt::format("{}{}{}", path.string(), ending, i);
  }
  return name;
}

/// What a removed checkpoint is called while it is being removed.
fs::path doomed(const fs::path& path) {
  return unused(
      path.parent_path() / ("." + path.filename().string()), kRemoved);
}

/// A folder as it was at one moment. Another one of the same name differs, and
/// so does one that has been given another name.
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

/// The folder of a step, which may just be replaced: see [Note: replacing a
/// folder].
std::optional<Identity> find_step(const fs::path& path) {
  if (auto found = identity_of(path)) {
    return found;
  }
  return identity_of(checkpoint::FolderWriter::aside_of(path));
}

[[noreturn]] void fail_to_list(const fs::path& folder, int error) {
  raise<checkpoint::CheckpointAccessError>(
      {.call = "CheckpointManager", .path = folder.native()},
      fmt::format(
          "cannot list this folder: {}.", checkpoint::system_reason(error)));
}

/// Names in a folder; nothing if it is not there (any more).
std::optional<std::vector<std::string>> names_in(const fs::path& folder) {
  if (const int error = checkpoint::opening_fault(folder)) {
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

/// Whole or not, a save has left files here.
bool is_ours(const fs::path& folder) {
  const auto names = names_in(folder);
  return names &&
      std::any_of(names->begin(), names->end(), [](const fs::path& name) {
           return name == ".metadata" || name == checkpoint::kChecksumsName ||
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

/// Checkpoints with exactly a step's name, by step; also damaged ones. One that
/// is just being replaced counts.
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
/// them. What is listed may be gone when it is opened, and a folder's list that
/// is made while entries come and go may lack the new and the old. So whoever
/// meets something that has changed since it was listed lists again, and an
/// empty list counts only if the folder has not changed while it was made.
/// There is no end to how often that may happen, but each time the trainer has
/// saved another one.
std::vector<Step> settled_steps_in(const fs::path& folder) {
  // Longer than the tick by which file systems date changes: what changes after
  // the pause gets a date that is not the one before it.
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
    checkpoint::Source::open(path);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Nothing if it has been replaced or removed since it was listed.
std::optional<std::string> problem_with(const Step& step) {
  std::string problem = problem_with(step.path);
  if (!problem.empty() && step.has_changed()) {
    return std::nullopt;
  }
  return problem;
}

/// Calls `body`; what it throws becomes a warning. For what must not keep the
/// rest from being tidied up.
template <class Body>
void tolerating(const fs::path& path, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    TORCH_WARN("CheckpointManager: ", path.string(), " stays: ", error.what());
  }
}

/// What earlier removals did not finish, saves of processes that died, and
/// steps that were being replaced then.
void remove_leftovers(const fs::path& folder) {
  for (const std::string& name :
       names_in(folder).value_or(std::vector<std::string>())) {
    if (name.rfind(".step_", 0) != 0) {
      continue;
    }
    const fs::path path = folder / name;
    tolerating(path, [&] {
      if (name.find(kRemoved) != std::string::npos) {
        checkpoint::remove_path(path);
      } else if (name.ends_with(".partial")) {
        checkpoint::PartialFolder::remove_if_stale(path);
      } else if (name.ends_with(kAside)) {
        checkpoint::FolderWriter::recover(
            folder / name.substr(1, name.size() - 1 - kAside.size()));
      }
    });
  }
}

/// [Note: a run that goes back]
///
/// Steps above the one that was just saved belong to a past that the run has
/// left: it was told to load an older one, or passed over what is damaged. They
/// must not be the latest any more, and are not ours to remove.
void set_aside_above(const fs::path& folder, int64_t saved) {
  for (const Step& step : steps_in(folder)) {
    if (step.step <= saved) {
      continue;
    }
    tolerating(step.path, [&] {
      const fs::path aside = unused(step.path, ".superseded");
      checkpoint::rename_path(step.path, aside);
      TORCH_WARN(
          "CheckpointManager: step ",
          saved,
          " was saved after step ",
          step.step,
          ", which is now ",
          aside.string());
    });
  }
}

/// -1 if there is none.
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

/// What rank 0 lists, on every rank; where it was found, on rank 0.
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

/// Whether rank 0 finds another one than it listed. Collective.
bool has_changed(const Peers& peers, const Step& step) {
  ByteWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      out.number(step.has_changed() ? 1 : 0);
    }
  });
  const Bytes bytes =
      peers.broadcast(out.take(), "is a checkpoint still there");
  return ByteReader(bytes).number() != 0;
}

} // namespace

CheckpointManager::CheckpointManager(
    fs::path folder,
    const ManagerOptions& options)
    : folder_(fs::absolute(folder).lexically_normal()), options_(options) {
  const Peers peers(options_.group());
  settle(peers, [&] {
    if (peers.is_root()) {
      std::error_code error;
      fs::create_directories(folder_, error);
      if (error) {
        raise<CheckpointError>(
            {.call = "CheckpointManager", .path = folder_.native()},
            fmt::format("cannot make this folder: {}.", error.message()));
      }
    }
  });
  settle(peers, [&] {
    if (!fs::is_directory(folder_)) {
      raise<CheckpointError>(
          {.call = "CheckpointManager",
           .rank = peers.rank(),
           .path = folder_.native()},
          "rank 0 has this folder, and this rank does not see it. Use a file system that all hosts share.");
    }
  });
}

CheckpointManager::~CheckpointManager() = default;

fs::path CheckpointManager::path_of(int64_t step) const {
  if (step < 0) {
    raise<c10::ValueError>(
        {.call = "CheckpointManager"},
        fmt::format("step {} is negative. Count from 0.", step));
  }
  return folder_ / name_of_step(step);
}

checkpoint::SaveOptions CheckpointManager::save_options() const {
  return checkpoint::SaveOptions()
      .group(options_.group())
      .overwrite(true)
      .files_per_rank(options_.files_per_rank());
}

void CheckpointManager::save(int64_t step, const StateDict& state) {
  wait();
  checkpoint::save(state, path_of(step), save_options());
  prune(step);
}

void CheckpointManager::save(int64_t step, checkpoint::Stateful& state) {
  save(step, state.state_dict());
}

void CheckpointManager::async_save(int64_t step, const StateDict& state) {
  wait();
  under_way_ = checkpoint::async_save(state, path_of(step), save_options());
  to_prune_ = step;
}

void CheckpointManager::async_save(int64_t step, checkpoint::Stateful& state) {
  async_save(step, state.state_dict());
}

void CheckpointManager::wait() {
  const auto step = std::exchange(to_prune_, std::nullopt);
  under_way_.wait();
  under_way_ = {};
  if (step) {
    prune(*step);
  }
}

void CheckpointManager::prune(int64_t saved) {
  if (!Peers(options_.group()).is_root()) {
    return;
  }
  // The checkpoint is there: that something old stays is no reason to stop.
  try {
    remove_leftovers(folder_);
    set_aside_above(folder_, saved);
    remove_old();
  } catch (const std::exception& error) {
    TORCH_WARN("CheckpointManager: old checkpoints stay: ", error.what());
  }
}

void CheckpointManager::remove_old() const {
  const auto keep = static_cast<size_t>(options_.keep_last());
  if (options_.keep_last() <= 0) {
    return;
  }
  const auto steps = steps_in(folder_);
  size_t num_sound = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (num_sound < keep) {
      num_sound += problem_with(step->path).empty() ? 1 : 0;
      continue; // one that is damaged does not count, and may tell why
    }
    if (options_.keep_every() > 0 && step->step % options_.keep_every() == 0) {
      continue;
    }
    // Under another name first: nobody takes what is left for whole.
    tolerating(step->path, [&] {
      const fs::path gone = doomed(step->path);
      checkpoint::rename_path(step->path, gone);
      checkpoint::remove_path(gone);
    });
  }
}

std::vector<CheckpointManager::Entry> CheckpointManager::list() const {
  std::map<int64_t, std::pair<Identity, std::string>> known; // looked at
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

std::optional<int64_t> CheckpointManager::latest() const {
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
std::optional<int64_t> CheckpointManager::load_newest(
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
      } catch (const DisagreementError&) { // ranks have seen different ones
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          throw;
        }
      } catch (const checkpoint::CheckpointAccessError&) {
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          throw; // it may be sound: an older one would be a step back
        }
      } catch (const CheckpointError& error) { // on all ranks
        must_list_again = has_changed(peers, *step);
        if (!must_list_again) {
          problems += fmt::format("\n  {}", error.what_without_backtrace());
          if (peers.is_root()) {
            TORCH_WARN(
                "a checkpoint is passed over: ",
                error.what_without_backtrace());
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

std::optional<int64_t> CheckpointManager::load_latest(
    StateDict& target,
    LoadOptions options) {
  return load_newest(target, std::move(options));
}

std::optional<int64_t> CheckpointManager::load_latest(
    checkpoint::Stateful& target,
    LoadOptions options) {
  return load_newest(target, std::move(options));
}

void CheckpointManager::load(
    int64_t step,
    StateDict& target,
    LoadOptions options) {
  wait();
  checkpoint::load(target, path_of(step), options.group(options_.group()));
}

void CheckpointManager::load(
    int64_t step,
    checkpoint::Stateful& target,
    LoadOptions options) {
  wait();
  checkpoint::load(target, path_of(step), options.group(options_.group()));
}

} // namespace tessera
