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
  /// Who saves and loads; default: the world, or this process alone.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// How many of the newest that are sound are kept; 0: all.
  TORCH_ARG(int64_t, keep_last) = 3;
  /// Steps that this divides are kept for ever; 0: none.
  TORCH_ARG(int64_t, keep_every) = 0;
  /// See SaveOptions.
  TORCH_ARG(int, files_per_rank) = 0;
};

/// The checkpoints of one run: a folder with one folder a step,
/// "step_00001000".
///
///   Manager checkpoints("runs/7/checkpoints");
///   int64_t step = checkpoints.load_latest(training).value_or(0);
///   ...
///   checkpoints.async_save(step, training);
///
/// All ranks make the same calls. After any crash the newest checkpoint that is
/// whole is found; what was being written is ignored and removed by a later
/// save.
class TESSERA_API Manager {
 public:
  /// Makes the folder if it is not there. Collective; throws CheckpointError.
  explicit Manager(
      std::filesystem::path folder,
      const ManagerOptions& options = {});
  /// Waits for a save under way; an error becomes a warning.
  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  /// Where all checkpoints are, and where that of a step is or would be.
  const std::filesystem::path& folder() const {
    return folder_;
  }
  std::filesystem::path path_of(int64_t step) const;

  /// Saves, then removes what is not to be kept; what cannot be removed is
  /// warned of. A step that is there already is replaced. Steps above this one
  /// belong to a past that the run has left: they are renamed to
  /// "step_00002000.superseded", with a warning, and stay. Waits for a save
  /// under way first, and throws what became of that one. Collective; throws as
  /// checkpoint::save().
  void save(int64_t step, const StateDict& state);
  void save(int64_t step, Stateful& state);
  /// The same behind what follows; one at a time.
  void async_save(int64_t step, const StateDict& state);
  void async_save(int64_t step, Stateful& state);
  /// For the save under way. Throws what went wrong with it. Collective.
  void wait();
  /// False when wait() would not block, also where the save has failed. Ranks
  /// may differ for a moment. Not collective.
  bool is_saving() const {
    return !under_way_.done();
  }

  /// A checkpoint that was found.
  struct Entry {
    int64_t step = 0; // in its name
    std::filesystem::path path; // of its folder
    /// Why it cannot be loaded; empty where nothing speaks against it. Sizes
    /// and descriptions are looked at, the bytes of tensors are not.
    std::string problem;
  };
  /// By step. This, latest() and load_latest() may be called while another
  /// process saves and removes here: each finds what is there at its end. Not
  /// collective.
  std::vector<Entry> list() const;
  /// The newest without a problem. Collective.
  std::optional<int64_t> latest() const;

  /// Loads the newest that can be loaded and returns its step; nothing if there
  /// is none. One that turns out to be damaged or incomplete is passed over
  /// with a warning, and an older one loaded. Collective; throws as
  /// checkpoint::load() for what does not fit and for what cannot be read now
  /// (CheckpointAccessError), and CheckpointError if all are damaged.
  std::optional<int64_t> load_latest(
      StateDict& target,
      LoadOptions options = {});
  std::optional<int64_t> load_latest(
      Stateful& target,
      LoadOptions options = {});
  /// One step. Collective; throws as checkpoint::load().
  void load(int64_t step, StateDict& target, LoadOptions options = {});
  void load(int64_t step, Stateful& target, LoadOptions options = {});

 private:
  template <class Target>
  std::optional<int64_t> load_newest(Target& target, LoadOptions options);
  SaveOptions save_options() const;
  void prune(int64_t saved);
  void remove_old() const;

  std::filesystem::path folder_;
  const ManagerOptions options_;
  AsyncSave under_way_;
  std::optional<int64_t> to_prune_; // the step under way
};

} // namespace tessera::checkpoint
