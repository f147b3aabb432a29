#include "comm/diagnostics/call.h"

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

std::string list_by_text(
    std::span<const std::string> texts,
    std::span<const int> names) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto same = std::find_if(groups.begin(), groups.end(), [&](auto& group) {
      return group.first == texts[i];
    });
    if (same == groups.end()) {
      same = groups.insert(groups.end(), {texts[i], {}});
    }
    same->second.push_back(names[i]);
  }
  std::string lines;
  for (const auto& [text, ranks] : groups) {
    lines += "\n  " + rank_list(ranks) + ": " + text;
  }
  return lines;
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
  std::vector<std::string> texts;
  for (const Call& call : calls) {
    texts.push_back(call.describe());
  }
  return "ranks are at different calls:" + list_by_text(texts, names) +
      "\n  Every rank must make the same collectives in the same order with the same shapes; look for a branch that depends on the rank.";
}

} // namespace tessera::comm
