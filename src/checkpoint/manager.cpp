#include <tessera/checkpoint/manager.h>
#include <tessera/error.h>

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <map>
#include <utility>

#include "base/byte_stream.h"
#include "base/byte_vector.h"
#include "checkpoint/peers.h"
#include "checkpoint/step_cleanup.h"
#include "checkpoint/step_folders.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

/// The steps that rank 0 lists, on every rank; `StepFolder::found` is set on
/// rank 0 only.
std::vector<StepFolder> steps_of_root(
    const Peers& peers,
    const fs::path& folder) {
  std::vector<StepFolder> steps;
  ByteWriter out;
  settle(peers, [&] {
    if (peers.is_root()) {
      steps = settled_steps_in(folder);
      out.number(steps.size());
      for (const StepFolder& step : steps) {
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
bool has_changed(const Peers& peers, const StepFolder& step) {
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
    remove_old(
        folder_,
        {.last = options_.keep_last(),
         .every = options_.keep_every(),
         .protected_step = protected_});
  } catch (const std::exception& error) {
    TORCH_WARN("checkpoint::Manager: old checkpoints stay: ", error.what());
  }
}

std::vector<Manager::Entry> Manager::list() const {
  std::map<int64_t, std::pair<FolderIdentity, std::string>>
      known; // checked already
  while (true) {
    std::vector<Entry> entries;
    bool has_changed = false;
    for (const StepFolder& step : settled_steps_in(folder_)) {
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
