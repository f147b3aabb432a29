#include <tessera/checkpoint/manager.h>
#include <tessera/error.h>

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "checkpoint/peers.h"
#include "checkpoint/store/checksums.h"
#include "checkpoint/store/files.h"
#include "checkpoint/store/folder_writer.h"
#include "checkpoint/store/source.h"
#include "checkpoint/wire.h"

namespace tessera {

namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointError;
using checkpoint::LoadOptions;
using checkpoint::Peers;

constexpr std::string_view kPrefix = "step_";

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

/// What a removed checkpoint is called while it is being removed.
fs::path doomed(const fs::path& path) {
  return path.parent_path() / ("." + path.filename().string() + ".removed");
}

std::string problem_with(const fs::path& path) {
  try {
    checkpoint::Source::open(path);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string name_of_step(int64_t step) {
  return fmt::format("{}{:08}", kPrefix, step);
}

/// Whole or not, a save has left files here.
bool is_ours(const fs::path& folder) {
  const auto entries = fs::directory_iterator(folder);
  return std::any_of(begin(entries), end(entries), [](const auto& entry) {
    const fs::path name = entry.path().filename();
    return name == ".metadata" || name == checkpoint::kChecksumsName ||
        name.extension() == ".distcp";
  });
}

/// Checkpoints with exactly a step's name, by step; also damaged ones.
std::vector<CheckpointManager::Entry> steps_in(const fs::path& folder) {
  std::vector<CheckpointManager::Entry> entries;
  try {
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      const auto step = step_of(name);
      if (step && name == name_of_step(*step) && entry.is_directory() &&
          is_ours(entry.path())) {
        entries.push_back({*step, entry.path(), ""});
      }
    }
  } catch (const fs::filesystem_error& error) {
    raise<checkpoint::CheckpointAccessError>(
        {.call = "CheckpointManager", .path = folder.native()},
        fmt::format("cannot list this folder: {}.", error.code().message()));
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.step < b.step;
  });
  return entries;
}

/// What earlier removals did not finish, and saves of processes that died.
void remove_leftovers(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(".step_", 0) != 0) {
      continue;
    }
    if (name.ends_with(".removed")) {
      checkpoint::remove_path(entry.path());
    } else if (name.ends_with(".partial")) {
      checkpoint::FolderWriter::remove_if_stale(entry.path());
    }
  }
}

/// [Note: a run that goes back]
///
/// Steps above the one that was just saved belong to a past that the run has
/// left: it was told to load an older one, or passed over what is damaged. They
/// must not be the latest any more, and are not ours to remove.
void set_aside_above(const fs::path& folder, int64_t saved) {
  for (const auto& entry : steps_in(folder)) {
    if (entry.step <= saved) {
      continue;
    }
    fs::path aside = entry.path.string() + ".superseded";
    for (int i = 2; fs::exists(aside); ++i) {
      aside = fmt::format("{}.superseded{}", entry.path.string(), i);
    }
    checkpoint::rename_path(entry.path, aside);
    TORCH_WARN(
        "CheckpointManager: step ",
        saved,
        " was saved after step ",
        entry.step,
        ", which is now ",
        aside.string());
  }
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
  const auto entries = steps_in(folder_);
  size_t num_sound = 0;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (num_sound < keep) {
      num_sound += problem_with(entry->path).empty() ? 1 : 0;
      continue; // one that is damaged does not count, and may tell why
    }
    if (options_.keep_every() > 0 && entry->step % options_.keep_every() == 0) {
      continue;
    }
    // Under another name first: nobody takes what is left for whole.
    checkpoint::rename_path(entry->path, doomed(entry->path));
    checkpoint::remove_path(doomed(entry->path));
  }
}

std::vector<CheckpointManager::Entry> CheckpointManager::list() const {
  auto entries = steps_in(folder_);
  for (Entry& entry : entries) {
    entry.problem = problem_with(entry.path);
  }
  return entries;
}

std::vector<int64_t> CheckpointManager::steps_of_root() const {
  const Peers peers(options_.group());
  checkpoint::WireWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      const auto entries = steps_in(folder_);
      out.number(entries.size());
      for (const Entry& entry : entries) {
        out.number(static_cast<uint64_t>(entry.step));
      }
    }
  });
  const Bytes bytes = peers.broadcast(out.take(), "checkpoints");
  checkpoint::WireReader in(bytes);
  std::vector<int64_t> steps(in.number());
  for (int64_t& step : steps) {
    step = static_cast<int64_t>(in.number());
  }
  return steps;
}

std::optional<int64_t> CheckpointManager::latest() const {
  const Peers peers(options_.group());
  const std::vector<int64_t> steps = steps_of_root();
  checkpoint::WireWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      const auto newest =
          std::find_if(steps.rbegin(), steps.rend(), [&](int64_t step) {
            return problem_with(path_of(step)).empty();
          });
      out.number(static_cast<uint64_t>(steps.rend() - newest));
    }
  });
  const Bytes bytes = peers.broadcast(out.take(), "the latest checkpoint");
  const uint64_t count = checkpoint::WireReader(bytes).number();
  return count == 0 ? std::nullopt : std::optional(steps[count - 1]);
}

template <class Target>
std::optional<int64_t> CheckpointManager::load_newest(
    Target& target,
    LoadOptions options) {
  wait();
  const Peers peers(options_.group());
  const std::vector<int64_t> steps = steps_of_root();
  options.group(options_.group());
  std::string problems;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    try {
      checkpoint::load(target, path_of(*step), options);
      return *step;
    } catch (const checkpoint::CheckpointAccessError&) {
      throw; // it may be sound: an older one would be a step back
    } catch (const CheckpointError& error) { // on all ranks
      problems += fmt::format("\n  {}", error.what_without_backtrace());
      if (peers.is_root()) {
        TORCH_WARN(
            "a checkpoint is passed over: ", error.what_without_backtrace());
      }
    }
  }
  if (!problems.empty()) {
    raise<CheckpointError>(
        {.call = "load_latest", .path = folder_.native()},
        "no checkpoint here can be loaded:" + problems);
  }
  return std::nullopt;
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
