#include "launch/verdict.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace tessera::launch {
namespace {

[[noreturn]] void refuse_bytes() {
  throw std::runtime_error(
      "a message from another node's launcher cannot be read. Start all nodes "
      "with the same version of tessera.");
}

int64_t to_integer(const std::string& text, int64_t min, int64_t max) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < min || value > max) {
    refuse_bytes();
  }
  return value;
}

bool is_cause(const NodeReport& report) {
  switch (report.ending) {
    case Ending::Failed:
    case Ending::Interrupted:
    case Ending::Error:
      return true;
    case Ending::Succeeded:
    case Ending::Stopped:
      return false;
  }
  return false;
}

} // namespace

int64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

Verdict decide(
    std::span<const NodeReport> reports,
    int attempt,
    int max_restarts) {
  const bool succeeded =
      std::all_of(reports.begin(), reports.end(), [](const NodeReport& r) {
        return r.ending == Ending::Succeeded;
      });
  if (succeeded) {
    return Verdict{};
  }

  size_t cause = reports.size();
  for (size_t node = 0; node < reports.size(); ++node) {
    if (is_cause(reports[node]) &&
        (cause == reports.size() ||
         reports[node].time_us < reports[cause].time_us)) {
      cause = node;
    }
  }
  Verdict verdict{
      .action = Action::Fail,
      .exit_code = 1,
      .node_rank = -1,
      .text = "a node stopped its ranks and did not say why."};
  if (cause == reports.size()) {
    return verdict;
  }
  verdict.node_rank = static_cast<int>(cause);
  verdict.exit_code = reports[cause].exit_code;
  verdict.text = reports[cause].text;
  if (reports.size() > 1 && reports[cause].ending == Ending::Error) {
    verdict.text = "node " + std::to_string(cause) + ": " + verdict.text;
  }
  for (size_t node = 0; node < reports.size(); ++node) {
    if (node != cause && reports[node].ending == Ending::Error) {
      verdict.text +=
          "\n  node " + std::to_string(node) + ": " + reports[node].text;
    }
  }
  const bool may_restart =
      std::all_of(reports.begin(), reports.end(), [](const NodeReport& r) {
        return r.may_restart;
      });
  if (reports[cause].ending == Ending::Failed && may_restart &&
      attempt < max_restarts) {
    verdict.action = Action::Restart;
  }
  return verdict;
}

std::vector<std::string> decode_fields(std::string_view bytes, size_t count) {
  auto fields = tessera::decode_fields(bytes);
  if (!fields || fields->size() != count) {
    refuse_bytes();
  }
  return std::move(*fields);
}

std::string encode(const NodeReport& report) {
  return encode_fields(
      {std::to_string(static_cast<int>(report.ending)),
       std::to_string(report.exit_code),
       report.may_restart ? "1" : "0",
       std::to_string(report.time_us),
       report.text});
}

NodeReport decode_report(std::string_view bytes) {
  const std::vector<std::string> fields = decode_fields(bytes, 5);
  return NodeReport{
      .ending = static_cast<Ending>(
          to_integer(fields[0], 0, static_cast<int>(Ending::Error))),
      .exit_code = static_cast<int>(to_integer(fields[1], 0, 255)),
      .may_restart = to_integer(fields[2], 0, 1) == 1,
      .time_us = to_integer(fields[3], 0, INT64_MAX),
      .text = fields[4]};
}

std::string encode(const Verdict& verdict) {
  return encode_fields(
      {std::to_string(static_cast<int>(verdict.action)),
       std::to_string(verdict.exit_code),
       std::to_string(verdict.node_rank),
       verdict.text});
}

Verdict decode_verdict(std::string_view bytes) {
  const std::vector<std::string> fields = decode_fields(bytes, 4);
  return Verdict{
      .action = static_cast<Action>(
          to_integer(fields[0], 0, static_cast<int>(Action::Fail))),
      .exit_code = static_cast<int>(to_integer(fields[1], 0, 255)),
      .node_rank = static_cast<int>(to_integer(fields[2], -1, INT32_MAX)),
      .text = fields[3]};
}

} // namespace tessera::launch
