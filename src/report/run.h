// A training run as recorded in its log. docs/report.md has the log's format.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::report {

inline constexpr std::array kMemoryKinds{
    "shards",
    "full",
    "gradients",
    "optimizer",
    "activations",
    "other"};
inline constexpr std::array kLanes{"compute", "gather", "reduce", "wait"};

/// A step that was logged. `has` tells which values the log contains.
struct Step {
  enum Field : uint8_t {
    kLoss = 1,
    kLr = 2,
    kGradNorm = 4,
    kTokens = 8,
    kSeconds = 16,
    kMemory = 32
  };

  int64_t step = 0;
  double loss = 0; // may be nan or infinite, as grad_norm
  double lr = 0;
  double grad_norm = 0;
  double tokens = 0;
  double seconds = 0;
  std::array<double, kMemoryKinds.size()> memory{}; // bytes
  uint8_t has = 0;
  bool is_skipped = false; // by a GradScaler

  double memory_total() const;
};

struct Eval {
  int64_t step = 0;
  double loss = 0;
};

/// Steps in a row that were run again later, after a restart.
struct Superseded {
  std::vector<Step> steps;
  std::vector<Eval> evals;
};

/// From a "start" line to the next.
struct Attempt {
  int64_t number = 0;
  int64_t start_step = 0;
  int64_t last_step = 0;
  int64_t world = 0; // 0: the log does not say
  std::optional<double> began; // seconds since 1970
  std::optional<double> last_seen;
  double step_seconds = 0; // sum over its steps
  std::string name;
  std::string device;
  std::string host;
  std::vector<std::pair<std::string, std::string>> versions;
  std::optional<int64_t> resumed_step;
  std::string resumed_path;
  std::optional<std::string> end_reason; // nothing: killed, or still running
  std::string error; // of one that failed
  /// The previous attempt ended properly and this one resumes; false for a
  /// restart and for the first attempt.
  bool is_continuation = false;

  /// How long the attempt ran, by the clock if the log has times.
  double seconds() const;
  /// Whether the attempt finished or was asked to stop.
  bool ended_well() const;
};

struct Unit {
  std::string name;
  int64_t parameters = 0;
  int64_t full_bytes = 0;
  int64_t shard_bytes = 0;
};

/// One value of the configuration; `was` if an earlier attempt had another.
struct ConfigRow {
  std::string path; // "model.layers"
  std::string value;
  std::optional<std::string> was;
};

struct Checkpoint {
  int64_t step = 0;
  size_t attempt = 0; // of `Run::attempts`
  std::optional<double> blocked_seconds;
  std::string path;
};

struct Sample {
  int64_t step = 0;
  std::string prompt;
  std::string text;
};

struct Span {
  size_t lane = 0; // of kLanes
  std::string name;
  double start = 0; // seconds since the step began
  double end = 0;
};

struct RankTimeline {
  int64_t rank = 0;
  std::vector<Span> spans;
};

struct Timeline {
  int64_t step = 0;
  std::vector<RankTimeline> ranks;
};

/// A line that could not be read.
struct Problem {
  int64_t line = 0;
  std::string what;
};

struct Run {
  std::vector<Attempt> attempts;
  /// The steps that count, ascending: the last run of each.
  std::vector<Step> steps;
  std::vector<Eval> evals;
  std::vector<Superseded> superseded;
  std::vector<Checkpoint> checkpoints;
  /// The newest entries; `num_` counts all of them.
  std::vector<Sample> samples;
  std::vector<Timeline> timelines;
  int64_t num_samples = 0;
  int64_t num_timelines = 0;
  /// From the newest attempt that logged them.
  std::vector<Unit> units;
  std::vector<ConfigRow> config;

  int64_t num_lines = 0;
  int64_t num_torn = 0; // cut off by a kill: normal
  int64_t num_problems = 0;
  std::vector<Problem> problems; // the first of them
};

} // namespace tessera::report
