#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

/// A checkpoint and the validation loss of its model.
struct Candidate {
  int64_t step = 0;
  double loss = std::numeric_limits<double>::infinity();
};

/// The checkpoint with the lowest validation loss of a run, on disk:
///
///   RUN/best         a link to its folder, checkpoints/step_00000600
///   RUN/best.json    the steps and losses of those that were the best
///
/// Both are replaced by renaming. RUN/best.json is written before a checkpoint
/// is saved, RUN/best when it is complete: after a kill anywhere, the best one
/// of those that are complete can be told. Functions throw std::runtime_error
/// if a file cannot be written.
class BestFile {
 public:
  explicit BestFile(std::filesystem::path run) : run_(std::move(run)) {}

  /// The best candidate up to step `last` whose checkpoint `is_there`; nothing
  /// if there is none. Those that a run has gone back from are forgotten. Where
  /// RUN/best.json is lost, what RUN/best names is the best, with a loss that
  /// is not known and counts as infinite. Writes nothing.
  std::optional<Candidate> open(
      int64_t last,
      const std::function<bool(int64_t)>& is_there);
  /// Makes both files agree with what open() found.
  void repair();
  /// Call it before the checkpoint is saved.
  void announce(const Candidate& candidate);
  /// Call it when the checkpoint at `path` is complete.
  void point_to(const std::filesystem::path& path);

  /// The checkpoint that RUN/best names, whether or not it exists; nothing if
  /// there is no RUN/best.
  static std::optional<std::filesystem::path> read(
      const std::filesystem::path& run);

 private:
  void write_candidates();

  const std::filesystem::path run_;
  std::vector<Candidate> candidates_;
  std::optional<Candidate> found_; // by open()
};

/// The step of a path such as "checkpoints/step_00000600"; nothing for others.
std::optional<int64_t> step_of(const std::filesystem::path& checkpoint);

} // namespace gpt
