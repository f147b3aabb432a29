#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Options of EventWriter.
struct TESSERA_API EventWriterOptions {
  /// For a run that resumes: TensorBoard hides the points of this step and
  /// later steps in earlier files of the folder. As in Python's SummaryWriter.
  TORCH_ARG(std::optional<int64_t>, purge_step) = std::nullopt;
  /// The ranks that train; default: the world, or this process alone.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// One point of a curve.
struct TESSERA_API EventScalar {
  /// The name of the curve; what is before a "/" groups curves.
  std::string tag;
  /// Written as a float, as TensorBoard keeps it. May be nan or infinite.
  double value = 0;
};

/// Writes curves for TensorBoard: one event file per writer in a folder, as
/// Python's SummaryWriter does. Scalars only.
///
///   EventWriter events("runs/7/tensorboard");
///   events.add_scalar("train/loss", loss, step);
///
///   tensorboard --logdir runs
///
/// Rank 0 of the group writes. The other ranks may make all calls too, but
/// write no file. No function is collective.
///
/// Every call is one write of a complete record with its checksum, so that a
/// run that is killed leaves a file that TensorBoard reads. A full disk, or any
/// other error in writing, does not stop training: the writer warns once, and
/// nothing more is written.
///
/// Thread safety: one thread at a time.
class TESSERA_API EventWriter {
 public:
  /// Creates the folder if it does not exist, and a new file in it. A folder
  /// that cannot be created or a file that cannot be opened is such an error
  /// too. Throws c10::ValueError if `purge_step` is negative.
  explicit EventWriter(
      const std::filesystem::path& folder,
      const EventWriterOptions& options = {});
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// FOLDER/events.out.tfevents.TIME.HOST.PID.NUMBER; empty on ranks that do
  /// not write.
  const std::filesystem::path& path() const;
  /// False after such a warning, and on ranks that do not write.
  bool is_writing() const;

  /// Writes one point, with the current time. Throws c10::ValueError, on every
  /// rank that makes the call, if the tag is empty or not UTF-8, or if the step
  /// is negative.
  void add_scalar(std::string_view tag, double value, int64_t step);
  /// Points of several curves at one step, in one record. Writes nothing if
  /// there are none. Throws as add_scalar(), before anything is written.
  void add_step(int64_t step, const std::vector<EventScalar>& scalars);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
