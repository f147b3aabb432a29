#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>
#include <tessera/train/monitor.h>

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Options of RunLog.
struct TESSERA_API RunLogOptions {
  /// The name of the run; default: the last part of the folder.
  TORCH_ARG(std::string, name);
  /// The ranks that train; default: the world, or this process alone.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// The record of one training step. Fields that are not set are not written.
struct TESSERA_API StepRecord {
  /// Counted from 1: the step that was just made.
  int64_t step = 0;
  /// The mean over the batch.
  std::optional<double> loss;
  /// The learning rate.
  std::optional<double> lr;
  /// The norm of the gradients before clipping.
  std::optional<double> grad_norm;
  std::optional<int64_t> tokens; // of all ranks, in this step
  /// The duration of the step.
  std::optional<double> seconds;
  std::optional<MemoryByKind> memory; // of this rank
  /// Model FLOPS utilization: the share of the devices' peak that the model's
  /// own arithmetic used, from 0 to 1.
  std::optional<double> mfu;
  /// What a GradScaler multiplied the losses by.
  std::optional<double> loss_scale;
  /// The GradScaler left out the step. Written only if it did.
  bool skipped = false;
};

/// Writes what happened in a run to FOLDER/log.jsonl, for `tessera report`:
/// one JSON object per line, described in docs/monitor.md.
///
///   RunLog log("runs/7");
///   log.start(step, {{"lr", 1e-3}}, monitor.units(), "cpu");
///   log.step({.step = step, .loss = loss, .memory = report.memory});
///   log.end(step, "finished");
///
/// Rank 0 of the group writes. The other ranks may make all calls too, but
/// write no file; only functions that say so below are collective.
///
/// Every line is one write at the end of the file, so that a run that is killed
/// leaves complete lines, except perhaps the last one. A run that resumes
/// appends; if the last line is torn, it begins a new line. Numbers are written
/// so that reading gives the same bits; numbers that are not finite become
/// "nan", "inf" and "-inf". Text that is not UTF-8 gets U+FFFD for its bad
/// bytes.
///
/// A full disk, or any other error in writing, does not stop training: the log
/// warns once, and nothing more is logged.
///
/// Thread safety: one thread at a time.
class TESSERA_API RunLog {
 public:
  /// Creates the folder if it does not exist. Not collective. A folder that
  /// cannot be created or a file that cannot be opened is such an error too.
  explicit RunLog(
      std::filesystem::path folder,
      const RunLogOptions& options = {});
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  /// FOLDER/log.jsonl.
  const std::filesystem::path& path() const;
  /// How many starts the file had before this run; 0 is the first. Known on
  /// rank 0, 0 elsewhere.
  int64_t attempt() const;
  /// False after such a warning, and on ranks that do not write.
  bool is_writing() const;

  /// Call it first, once. `step` is the step that the run starts from. Tensors
  /// in a dictionary are written as their shapes. JSON text is written as it
  /// is, on one line; throws c10::ValueError on all ranks if it is not JSON.
  void start(
      int64_t step,
      const StateDict& config,
      const std::vector<UnitInfo>& units,
      const std::string& device);
  void start_with_json(
      int64_t step,
      std::string_view config,
      const std::vector<UnitInfo>& units,
      const std::string& device);
  /// `path` as the reader should see it: below FOLDER it becomes relative.
  void resume(int64_t step, const std::filesystem::path& path);

  /// Not collective: the memory is that of rank 0.
  void step(const StepRecord& record);
  /// The memory of the rank that has the most; the rest is that of rank 0.
  /// Collective.
  void step_of_all(const StepRecord& record);
  void eval(int64_t step, double loss);
  void sample(int64_t step, std::string_view prompt, std::string_view text);
  /// `blocked_seconds` is how long training stood still.
  void checkpoint(
      int64_t step,
      const std::filesystem::path& path,
      double blocked_seconds);
  /// The spans of all ranks. Collective.
  void timeline(int64_t step, const std::vector<TimelineSpan>& spans);
  /// `reason` is "finished", "stopped", or "failed" and what the error says.
  void end(
      int64_t step,
      const std::string& reason,
      std::string_view error = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
