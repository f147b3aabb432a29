#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// Which checkpoints a manager keeps.
struct TESSERA_API ManagerOptions {
  /// The ranks that save and load; default: the world, or this process alone.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// How many of the newest sound checkpoints are kept; 0 for all. See also
  /// Manager::protect().
  TORCH_ARG(int64_t, keep_last) = 3;
  /// Steps that are multiples of this are kept forever; 0 for none.
  TORCH_ARG(int64_t, keep_every) = 0;
  /// See SaveOptions.
  TORCH_ARG(int, files_per_rank) = 0;
};

/// The checkpoints of one run: a folder with one folder per step,
/// "step_00001000".
///
///   Manager checkpoints("runs/7/checkpoints");
///   int64_t step = checkpoints.load_latest(training).value_or(0);
///   ...
///   checkpoints.async_save(step, training);
///
/// All ranks make the same calls. After any crash a run resumes from the newest
/// complete checkpoint; an incomplete one is ignored, and removed by a later
/// save.
class TESSERA_API Manager {
 public:
  /// Creates the folder if it does not exist. Collective; throws
  /// CheckpointError.
  explicit Manager(
      const std::filesystem::path& folder,
      const ManagerOptions& options = {});
  /// Waits for a save in the background; an error becomes a warning.
  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  /// The folder of all checkpoints, and the folder that a step has or would
  /// have.
  const std::filesystem::path& folder() const {
    return folder_;
  }
  std::filesystem::path path_of(int64_t step) const;

  /// Saves, then removes old checkpoints; warns if one cannot be removed. An
  /// existing checkpoint of the same step is replaced. Steps above this one
  /// belong to a past that the run has abandoned: they are renamed to
  /// "step_00002000.superseded", with a warning, and stay. First waits for a
  /// save in the background, and throws its error. Collective; throws as
  /// checkpoint::save().
  void save(int64_t step, const StateDict& state);
  void save(int64_t step, Stateful& state);
  /// The same in the background; one save at a time.
  void async_save(int64_t step, const StateDict& state);
  void async_save(int64_t step, Stateful& state);
  /// Waits for the save in the background and throws its error. Collective.
  void wait();
  /// False if wait() would not block, also if the save has failed. Ranks may
  /// differ for a moment. Not collective.
  bool is_saving() const {
    return !under_way_.done();
  }

  /// Keeps later saves from removing the checkpoint of this step, such as the
  /// best one so far, whatever keep_last says. Protects one step at a time;
  /// std::nullopt protects none. A new manager protects none, so call this
  /// before its first save. Not collective, but all ranks must make the call.
  /// Throws c10::ValueError if the step is negative.
  void protect(std::optional<int64_t> step);

  /// A checkpoint that was found.
  struct Entry {
    int64_t step = 0; // in its name
    std::filesystem::path path; // of its folder
    /// Why it cannot be loaded; empty if no problem was found. Sizes and
    /// descriptions are checked, the bytes of tensors are not.
    std::string problem;
  };
  /// Sorted by step. list(), latest() and load_latest() may be called while
  /// another process saves and removes checkpoints here: each finds what exists
  /// when it returns. Not collective.
  std::vector<Entry> list() const;
  /// The newest checkpoint without a problem. Collective.
  std::optional<int64_t> latest() const;

  /// Resumes from the newest checkpoint that can be loaded and returns its
  /// step; nothing if there is none. A checkpoint that turns out to be damaged
  /// or incomplete is skipped with a warning, and an older one is loaded.
  /// Collective; throws as checkpoint::load() does if something does not fit or
  /// cannot be read now (CheckpointAccessError), and CheckpointError if all
  /// checkpoints are damaged.
  std::optional<int64_t> load_latest(
      StateDict& target,
      LoadOptions options = {});
  std::optional<int64_t> load_latest(
      Stateful& target,
      LoadOptions options = {});
  /// Loads one step. Collective; throws as checkpoint::load().
  void load(int64_t step, StateDict& target, LoadOptions options = {});
  void load(int64_t step, Stateful& target, LoadOptions options = {});

 private:
  template <class Target>
  std::optional<int64_t> load_newest(Target& target, LoadOptions options);
  SaveOptions save_options() const;
  void prune(int64_t saved);

  std::filesystem::path folder_;
  const ManagerOptions options_;
  AsyncSave under_way_;
  std::optional<int64_t> to_prune_; // the step being saved
  std::optional<int64_t> protected_;
};

} // namespace tessera::checkpoint
