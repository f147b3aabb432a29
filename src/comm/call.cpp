#include "comm/call.h"

#include <utility>

namespace tessera::comm {

std::string Call::describe() const {
  std::string text = operation;
  if (detail[0] != '\0') {
    text += std::string(" of ") + detail;
  }
  text += " (" + std::to_string(bytes) + " bytes)";
  if (label[0] != '\0') {
    text += std::string(" for \"") + label + "\"";
  }
  return text + ", call #" + std::to_string(sequence);
}

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::optional<std::string> describe_mismatch(
    std::span<const Call> calls,
    std::span<const int> names) {
  const bool agree =
      std::all_of(calls.begin(), calls.end(), [&](const Call& call) {
        return call.matches(calls.front());
      });
  if (agree) {
    return std::nullopt;
  }
  std::vector<std::pair<std::string, std::vector<int>>> callers;
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string text = calls[i].describe();
    auto same = std::find_if(callers.begin(), callers.end(), [&](auto& entry) {
      return entry.first == text;
    });
    if (same == callers.end()) {
      callers.push_back({text, {names[i]}});
    } else {
      same->second.push_back(names[i]);
    }
  }
  std::string what = "ranks are at different calls:";
  for (const auto& [text, ranks] : callers) {
    what += "\n  " + rank_list(ranks) + ": " + text;
  }
  return what +
      "\n  Every rank must make the same collectives in the same order with the same shapes; look for a branch that depends on the rank.";
}

} // namespace tessera::comm
