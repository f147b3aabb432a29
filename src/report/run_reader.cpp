#include "report/run_reader.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "report/line_reader.h"
#include "report/log_line.h"
#include "report/report_error.h"

namespace tessera::report {
namespace {

constexpr size_t kMaxLineBytes = 16 << 20;
constexpr size_t kMaxProblems = 20;
constexpr size_t kMaxSamples = 20;
constexpr size_t kMaxTimelines = 3;
constexpr size_t kMaxConfig = 600;
constexpr const char* kNotSet = "(not set)";

// Where an attempt's first line begins if the line before it was cut off and
// the writer did not begin a new line.
constexpr std::string_view kStartOfStart = "{\"kind\":\"start\"";

template <class T>
void push_bounded(std::vector<T>* values, T value, size_t max) {
  if (values->size() == max) {
    values->erase(values->begin());
  }
  values->push_back(std::move(value));
}

/// Moves the elements from step `first` on out of `from`.
template <class T>
std::vector<T> take_from(std::vector<T>* from, int64_t first) {
  const auto begin = std::lower_bound(
      from->begin(), from->end(), first, [](const T& value, int64_t step) {
        return value.step < step;
      });
  std::vector<T> taken(begin, from->end());
  from->erase(begin, from->end());
  return taken;
}

/// Folds lines into a run.
class RunReader {
 public:
  void add(const LineReader::Line& line) {
    ++run_.num_lines;
    if (line.is_too_long) {
      settle_held(/*is_torn=*/false);
      note(
          {line.number,
           "is longer than " + std::to_string(kMaxLineBytes >> 20) + " MiB"});
      return;
    }
    if (line.text.find_first_not_of(" \t\r") == std::string_view::npos) {
      return;
    }
    try {
      take(parse_line(line.text));
    } catch (const NotJson& error) {
      take_torn(line, error.what());
    } catch (const LineError& error) {
      settle_held(/*is_torn=*/false);
      note({line.number, error.what()});
    }
  }

  Run finish() {
    settle_held(/*is_torn=*/held_ && !held_has_end_);
    return std::move(run_);
  }

 private:
  void note(Problem problem) {
    ++run_.num_problems;
    if (run_.problems.size() < kMaxProblems) {
      run_.problems.push_back(std::move(problem));
    }
  }

  // A line that is not JSON was cut off by a kill if it is the file's last and
  // has no end, or if the next attempt begins after it or in it. The line is
  // held back until that is known.
  void take_torn(const LineReader::Line& line, const char* what) {
    settle_held(/*is_torn=*/false);
    held_ = Problem{line.number, what};
    held_has_end_ = line.has_end;
    const size_t start = line.text.rfind(kStartOfStart);
    if (start != std::string_view::npos && start > 0) {
      --run_.num_lines; // it counts once
      add(
          {.text = line.text.substr(start),
           .number = line.number,
           .has_end = line.has_end});
    }
  }

  void settle_held(bool is_torn) {
    if (!held_) {
      return;
    }
    if (is_torn) {
      ++run_.num_torn;
    } else {
      note(*std::move(held_));
    }
    held_.reset();
  }

  void take(LogLine line) {
    const bool is_start = std::holds_alternative<StartLine>(line.content);
    settle_held(/*is_torn=*/is_start);
    if (is_start) {
      start(std::get<StartLine>(std::move(line.content)), line.time);
      return;
    }
    if (std::holds_alternative<OtherLine>(line.content)) {
      return;
    }
    if (run_.attempts.empty()) {
      start({}, line.time);
    }
    if (line.time) {
      attempt().last_seen = line.time;
    }
    std::visit(
        [this](auto&& content) {
          this->take_content(std::forward<decltype(content)>(content));
        },
        std::move(line.content));
  }

  void start(StartLine line, std::optional<double> time) {
    line.attempt.began = time;
    line.attempt.last_seen = time;
    line.attempt.is_continuation =
        !run_.attempts.empty() && attempt().ended_well();
    run_.attempts.push_back(std::move(line.attempt));
    if (!line.units.empty()) {
      run_.units = std::move(line.units);
    }
    if (!line.config.empty()) {
      take_config(std::move(line.config));
    }
  }

  // Bindings move from `rows`, which clang-tidy does not see.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  void take_config(std::vector<std::pair<std::string, std::string>> rows) {
    std::map<std::string, ConfigRow> earlier;
    for (ConfigRow& row : run_.config) {
      earlier.emplace(row.path, std::move(row));
    }
    const bool is_first = run_.config.empty();
    run_.config.clear();
    for (auto& [path, value] : rows) {
      ConfigRow row{.path = std::move(path), .value = std::move(value)};
      const auto found = earlier.find(row.path);
      if (found == earlier.end()) {
        row.was = is_first ? std::nullopt : std::optional<std::string>(kNotSet);
      } else {
        row.was = found->second.value != row.value
            ? std::optional(std::move(found->second.value))
            : std::move(found->second.was);
        earlier.erase(found);
      }
      run_.config.push_back(std::move(row));
    }
    for (auto& [path, row] : earlier) { // no longer given
      if (run_.config.size() >= kMaxConfig) {
        break;
      }
      run_.config.push_back(
          {.path = path,
           .value = kNotSet,
           .was = row.value == kNotSet ? std::move(row.was)
                                       : std::optional(std::move(row.value))});
    }
  }

  void take_content(OtherLine&&) {}
  void take_content(StartLine&&) {}

  void take_content(ResumeLine&& line) {
    attempt().resumed_step = line.step;
    attempt().resumed_path = std::move(line.path);
  }

  void take_content(Step&& step) {
    if (!run_.steps.empty() && step.step <= run_.steps.back().step) {
      supersede(step.step);
    }
    attempt().last_step = step.step;
    attempt().step_seconds += step.seconds;
    run_.steps.push_back(step);
  }

  /// Steps from `first` on are run again.
  void supersede(int64_t first) {
    run_.superseded.push_back(
        {.steps = take_from(&run_.steps, first),
         .evals = take_from(&run_.evals, first)});
  }

  void take_content(Eval&& eval) {
    if (!run_.evals.empty() && eval.step <= run_.evals.back().step) {
      run_.superseded.push_back({.evals = take_from(&run_.evals, eval.step)});
    }
    run_.evals.push_back(eval);
  }

  void take_content(Sample&& sample) {
    ++run_.num_samples;
    push_bounded(&run_.samples, std::move(sample), kMaxSamples);
  }

  void take_content(Checkpoint&& checkpoint) {
    checkpoint.attempt = run_.attempts.size() - 1;
    run_.checkpoints.push_back(std::move(checkpoint));
  }

  void take_content(Timeline&& timeline) {
    ++run_.num_timelines;
    push_bounded(&run_.timelines, std::move(timeline), kMaxTimelines);
  }

  void take_content(EndLine&& line) {
    attempt().end_reason = std::move(line.reason);
    attempt().error = std::move(line.error);
  }

  Attempt& attempt() {
    return run_.attempts.back();
  }

  Run run_;
  std::optional<Problem> held_;
  bool held_has_end_ = false;
};

} // namespace

Run read_run(const std::filesystem::path& log) {
  if (!std::filesystem::exists(log)) {
    throw ReportError(
        "there is no \"" + log.string() +
        "\". Give the folder of a run that wrote a log.");
  }
  if (!std::filesystem::is_regular_file(log)) {
    throw ReportError("\"" + log.string() + "\" is not a file.");
  }
  LineReader lines(log, kMaxLineBytes);
  RunReader reader;
  LineReader::Line line;
  while (lines.next(&line)) {
    reader.add(line);
  }
  Run run = reader.finish();
  if (run.attempts.empty()) {
    std::string text = "\"" + log.string() +
        "\" has no line of a training log (" + std::to_string(run.num_lines) +
        " lines, " + std::to_string(run.num_problems) +
        " of them not readable). docs/report.md has the format.";
    for (const Problem& problem : run.problems) {
      text += "\n  line " + std::to_string(problem.line) + ": " + problem.what;
    }
    throw ReportError(text);
  }
  return run;
}

} // namespace tessera::report
