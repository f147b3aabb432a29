#include "launch/failure_report.h"

#include <cstdio>
#include <functional>

#include "launch/line_mux.h"
#include "launch/signals.h"

namespace tessera::launch {
namespace {

std::string seconds_text(double seconds) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

std::string shell_quoted(const std::string& word) {
  const std::string plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
      "-_=+,./:@%^";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) {
    return word;
  }
  std::string result = "'";
  for (char c : word) {
    result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return result + "'";
}

std::string stop_text(const RankEnd& end) {
  if (end.status.signal == SIGKILL) {
    return "SIGKILL after " + seconds_text(end.stop_seconds);
  }
  return end.status.signal != 0 ? signal_name(end.status.signal)
                                : status_text(end.status);
}

// "1 (...), 2 (...)" over the ends of one kind.
std::string list_text(
    std::span<const RankEnd> ends,
    RankEnd::Kind kind,
    const std::function<std::string(const RankEnd&)>& detail) {
  std::string result;
  for (const RankEnd& end : ends) {
    if (end.kind == kind) {
      result += (result.empty() ? "" : ", ") + std::to_string(end.rank);
      const std::string text = detail(end);
      result += text.empty() ? "" : " (" + text + ")";
    }
  }
  return result;
}

void append_line(
    std::string* text,
    const std::string& label,
    const std::string& list) {
  if (!list.empty()) {
    *text += "\n  " + label + ": " + list + ".";
  }
}

} // namespace

std::string status_text(const ExitStatus& status) {
  return status.signal != 0 ? "killed by " + describe_signal(status.signal)
                            : "exit code " + std::to_string(status.code);
}

std::string stopped_text(std::span<const RankEnd> ends) {
  return list_text(ends, RankEnd::Kind::Stopped, stop_text);
}

std::string interrupted_text(
    const RunOptions& options,
    int signal,
    const std::string& stopped) {
  return "interrupted by " + signal_name(signal) +
      (options.num_nodes > 1 ? " on node " + std::to_string(options.node_rank)
                             : "") +
      (stopped.empty() ? "." : "; the ranks were stopped: " + stopped + ".");
}

std::string command_text(const RunOptions& options) {
  std::string result = shell_quoted(options.program);
  for (const std::string& arg : options.args) {
    result += " " + shell_quoted(arg);
  }
  return result;
}

std::string failure_text(
    const RunOptions& options,
    const FailureReport& report) {
  const RankEnd& first = report.first;
  std::string text = "rank " + std::to_string(first.rank);
  if (options.num_nodes > 1) {
    text += " on node " + std::to_string(options.node_rank);
  }
  text += " failed first (pid " + std::to_string(report.pid) + ", " +
      status_text(first.status) + ", after " + seconds_text(report.seconds) +
      ", attempt " + std::to_string(report.attempt + 1) + " of " +
      std::to_string(options.max_restarts + 1) + ").";
  if (first.status.signal == SIGKILL) {
    text +=
        "\n  SIGKILL often comes from the kernel's out-of-memory killer: check "
        "dmesg.";
  }
  text += "\n  program: " + command_text(options);
  if (report.last_lines.empty()) {
    text += "\n  it printed nothing.";
  } else {
    text += report.speaker == first.rank
        ? "\n  its last lines:"
        : "\n  it printed nothing; the last lines of rank " +
            std::to_string(report.speaker) + ":";
    const std::string prefix =
        rank_prefix(report.speaker, options.world_size());
    for (const std::string& line : report.last_lines) {
      text += "\n    " + prefix + line;
    }
  }
  const std::span<const RankEnd> others = report.others;
  const auto status = [](const RankEnd& end) {
    return status_text(end.status);
  };
  const auto nothing = [](const RankEnd&) { return std::string(); };
  append_line(
      &text, "also failed", list_text(others, RankEnd::Kind::Failed, status));
  append_line(
      &text,
      "had finished",
      list_text(others, RankEnd::Kind::Finished, nothing));
  append_line(&text, "the other ranks were stopped", stopped_text(others));
  append_line(
      &text,
      "still there after SIGKILL",
      list_text(others, RankEnd::Kind::Unkillable, nothing));
  if (!report.log_path.empty()) {
    text += "\n  logs: " + report.log_path;
  }
  return text;
}

} // namespace tessera::launch
