#include "exported/format/module_frames.h"

#include <algorithm>
#include <charconv>

#include "checkpoint/format/format_error.h"

namespace tessera::exported {
namespace {

// What torch writes for nodes that it made itself.
constexpr std::string_view kNoModules =
    "_empty_nn_module_stack_from_metadata_hook";

class FrameText {
 public:
  FrameText(std::string_view text, const OddPaths& odd_paths)
      : text_(text), is_path_(odd_paths.found_in(text)) {}

  /// The first `wanted` from `from` on that separates, or `end`. Brackets hold
  /// together: a class may be "Pair[int, str]".
  size_t find(char wanted, size_t from, size_t end) const {
    int64_t depth = 0;
    for (size_t i = from; i < end; ++i) {
      if (!is_path_.empty() && is_path_[i]) {
        continue;
      }
      const char c = text_[i];
      if (c == '[' || c == '(') {
        ++depth;
      } else if (c == ']' || c == ')') {
        --depth;
      } else if (c == wanted && depth == 0) {
        return i;
      }
    }
    return end;
  }

  std::string_view part(size_t begin, size_t end) const {
    return text_.substr(begin, end - begin);
  }
  size_t size() const {
    return text_.size();
  }

 private:
  std::string_view text_;
  std::vector<bool> is_path_;
};

// The key of a module's second call ends with "@1".
int64_t call_of(std::string_view key) {
  int64_t call = 0;
  const size_t at = key.rfind('@');
  if (at != key.npos) {
    const char* end = key.data() + key.size();
    const auto [stop, error] = std::from_chars(key.data() + at + 1, end, call);
    if (error != std::errc() || stop != end || call < 0) {
      call = 0;
    }
  }
  return call;
}

} // namespace

OddPaths::OddPaths(const std::vector<std::string>& paths) {
  std::copy_if(
      paths.begin(), paths.end(), std::back_inserter(paths_), [](auto& path) {
        return path.find_first_of(",;[]()") != path.npos;
      });
  std::stable_sort(paths_.begin(), paths_.end(), [](auto& a, auto& b) {
    return a.size() > b.size();
  });
}

std::vector<bool> OddPaths::found_in(std::string_view text) const {
  std::vector<bool> found;
  for (const auto& path : paths_) {
    for (size_t at = text.find(path); at != text.npos;
         at = text.find(path, at + path.size())) {
      found.resize(text.size());
      std::fill_n(found.begin() + static_cast<int64_t>(at), path.size(), true);
    }
  }
  return found;
}

std::vector<ModuleFrame> read_module_frames(
    std::string_view text,
    const OddPaths& odd_paths) {
  const FrameText frames(text, odd_paths);
  std::vector<ModuleFrame> modules;
  for (size_t begin = 0; begin < frames.size();) {
    const size_t end = frames.find(';', begin, frames.size());
    const size_t key_end = frames.find(',', begin, end);
    const size_t path_end =
        key_end < end ? frames.find(',', key_end + 1, end) : end;
    if (path_end == end) {
      throw format::FormatError(
          "the module " + format::in_quotes(frames.part(begin, end)) +
          " is not of the form KEY,PATH,CLASS");
    }
    const auto key = frames.part(begin, key_end);
    if (key != kNoModules) {
      modules.push_back(
          {.path = std::string(frames.part(key_end + 1, path_end)),
           .class_name = std::string(frames.part(path_end + 1, end)),
           .call = call_of(key)});
    }
    begin = end + 1;
  }
  return modules;
}

} // namespace tessera::exported
