// One line of a log, read and checked. Nothing in a line is trusted: numbers
// have bounds, long texts are cut.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "report/run.h"

namespace tessera::report {

/// What is wrong with a line: `"loss" is not a number`.
class LineError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A line that is not JSON: nonsense, or cut off by a kill.
class NotJson : public LineError {
  using LineError::LineError;
};

struct StartLine {
  Attempt attempt;
  std::vector<Unit> units;
  std::vector<std::pair<std::string, std::string>> config; // path and value
};

struct ResumeLine {
  int64_t step = 0;
  std::string path;
};

struct EndLine {
  std::string reason;
  std::string error;
};

/// A kind of line that this program does not know.
struct OtherLine {};

struct LogLine {
  std::optional<double> time;
  std::variant<
      OtherLine,
      StartLine,
      ResumeLine,
      Step,
      Eval,
      Sample,
      Checkpoint,
      Timeline,
      EndLine>
      content;
};

/// Throws LineError.
LogLine parse_line(std::string_view text);

} // namespace tessera::report
