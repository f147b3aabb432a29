#include "checkpoint/format/json_spans.h"

namespace tessera::format {
namespace {

constexpr std::string_view kBetween = " \t\r\n,:";

// Behind the quotation mark that ends the string.
size_t end_of_string(std::string_view text, size_t begin) {
  size_t at = begin + 1;
  while (at < text.size() && text[at] != '"') {
    at += text[at] == '\\' ? 2 : 1;
  }
  return at < text.size() ? at + 1 : text.npos;
}

size_t end_of_word(std::string_view text, size_t begin) {
  const size_t end = text.find_first_of(" \t\r\n,:]}[{\"", begin);
  return end == text.npos ? text.size() : end;
}

} // namespace

std::vector<JsonSpan> find_json_values(std::string_view text) {
  std::vector<JsonSpan> values;
  std::vector<size_t> open;
  JsonSpan next;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '}' || c == ']') {
      if (open.empty()) {
        return {};
      }
      values[open.back()].end = ++at;
      open.pop_back();
      continue;
    }
    if (kBetween.find(c) != kBetween.npos) {
      ++at;
      continue;
    }
    const bool is_string = c == '"';
    const bool is_open = c == '{' || c == '[';
    const size_t end = is_string ? end_of_string(text, at)
        : is_open                ? at + 1
                                 : end_of_word(text, at);
    if (end == text.npos) {
      return {};
    }
    if (is_string && end < text.size() && text[end] == ':') {
      next.name_begin = at;
      next.name_end = end;
    } else {
      next.begin = at;
      next.end = end;
      next.parent = open.empty() ? values.size() : open.back();
      next.kind = c;
      if (is_open) {
        open.push_back(values.size());
      }
      values.push_back(next);
      next = {};
    }
    at = end;
  }
  return open.empty() ? values : std::vector<JsonSpan>();
}

} // namespace tessera::format
