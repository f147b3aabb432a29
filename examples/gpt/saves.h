#pragma once

#include <tessera/tessera.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "best.h"
#include "parallel.h"
#include "settings.h"

namespace gpt {

/// The checkpoints of a run, RUN/checkpoints: saved while training goes on,
/// loaded, and with --keep-best the best one of them kept. All ranks make the
/// same calls; those that are not collective say so.
class Saves {
 public:
  /// Called on rank 0, when a save is complete. Ranks may notice that at
  /// different times.
  using OnSaved = std::function<void(
      int64_t step,
      const std::filesystem::path& path,
      double blocked_seconds)>;

  Saves(
      const tessera::Group& world,
      const Settings& settings,
      Parallel& parallel);

  const std::filesystem::path& folder() const {
    return checkpoints_.folder();
  }
  std::filesystem::path path_of(int64_t step) const {
    return checkpoints_.path_of(step);
  }
  std::optional<int64_t> latest() const {
    return checkpoints_.latest();
  }

  /// What is saved besides model, optimizer and step: add parts before they are
  /// saved or loaded.
  tessera::TrainingState& state() {
    return state_;
  }

  /// Loads, and returns the step; nothing if there is no checkpoint. Throws
  /// CheckpointError if RUN/best names a checkpoint that does not exist.
  std::optional<int64_t> load(From from);

  /// Call it before the first step, with the step to start from: finds out
  /// which checkpoint is the best so far.
  void start(int64_t step, OnSaved on_saved);
  /// The lowest validation loss of the checkpoints that --keep-best kept;
  /// infinite if there is none. Not collective.
  double best_loss() const {
    return best_.loss;
  }
  /// Saves, after waiting for the save before. With `best_loss` this one is the
  /// best from now on. Throws if that save failed, and std::runtime_error if
  /// parameters are not finite: a checkpoint must be worth resuming from.
  void save(int64_t step, std::optional<double> best_loss = std::nullopt);
  /// Looks whether the newest save is complete, and waits for nothing. Not
  /// collective.
  void note_saved();
  /// Waits until the newest save is complete; throws if it failed.
  void wait();
  /// The newest checkpoint that this process saved or resumed from; empty if
  /// there is none. Not collective.
  std::filesystem::path newest_path() const;

 private:
  struct Save {
    int64_t step = 0;
    double blocked_seconds = 0;
    bool is_best = false;
    bool is_noted = false;
  };

  bool has_finite_parameters();
  std::optional<int64_t> step_of_best() const;
  void on_rank_0(const std::function<void()>& write);

  const tessera::Group world_;
  const Settings& settings_;
  Parallel& parallel_;
  tessera::TrainingState state_;
  tessera::checkpoint::Manager checkpoints_;
  OnSaved on_saved_;
  BestFile best_file_;
  Candidate best_; // of this run, in memory; the same on all ranks
  std::optional<Save> newest_; // of this process
  std::optional<int64_t> complete_; // the newest
};

} // namespace gpt
