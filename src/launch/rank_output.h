#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/console.h"
#include "launch/line_mux.h"

namespace tessera::launch {

/// A log file or pipe that could not be made or written; the text names it.
class OutputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where one rank's output goes.
struct OutputPlan {
  int rank = 0;
  int world_size = 1;
  /// Folder for stdout.log and stderr.log; made where it is missing.
  std::optional<std::filesystem::path> log_dir;
  /// Whether lines are printed with the rank in front.
  bool print = true;
};

/// The two pipes of one rank, and what is done with what arrives: bytes go to
/// the log files as they are, whole lines go to the console, and the last ones
/// are kept for a failure report.
class RankOutput {
 public:
  /// Makes the pipes and log files. Borrows `console`. Throws OutputError.
  RankOutput(const OutputPlan& plan, Console* console);
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;

  /// The descriptor for the rank, until close_rank_ends().
  int rank_fd(Stream stream) const;
  /// To be called once the rank has been started.
  void close_rank_ends();

  /// The descriptor to read from, -1 after its end.
  int read_fd(Stream stream) const;
  /// Reads once without blocking. Throws OutputError if a log file cannot be
  /// written.
  void read_some(Stream stream);
  /// Reads all that is there, also where somebody still holds the other end,
  /// and gives out unfinished lines. Nothing can be read afterwards.
  void drain();

  /// The last lines of stderr, or of stdout where stderr was empty, and the
  /// log file that holds them (empty without a log folder).
  std::vector<std::string> last_lines() const;
  std::filesystem::path last_lines_log() const;

 private:
  struct Pipe {
    UniqueFd read_end;
    UniqueFd write_end;
    UniqueFd log;
    std::filesystem::path log_path;
    std::optional<LineSplitter> splitter;
    LineTail tail;
  };
  enum class ReadResult { Data, Nothing };

  void open(Stream stream, const OutputPlan& plan);
  void write_log(const Pipe& pipe, std::string_view bytes) const;
  ReadResult read_once(Stream stream);
  Stream telling_stream() const;
  Pipe& pipe(Stream stream) {
    return pipes_[static_cast<size_t>(stream)];
  }
  const Pipe& pipe(Stream stream) const {
    return pipes_[static_cast<size_t>(stream)];
  }

  std::string prefix_;
  Console* console_;
  std::array<Pipe, 2> pipes_;
};

} // namespace tessera::launch
