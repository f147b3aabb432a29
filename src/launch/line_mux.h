#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launch {

/// Cuts a stream of bytes into lines.
class LineSplitter {
 public:
  /// A longer line is given in pieces of this size.
  static constexpr size_t kMaxLineBytes = 64 * 1024;

  /// Receives one line without its newline, valid during the call.
  using OnLine = std::function<void(std::string_view line)>;

  explicit LineSplitter(OnLine on_line) : on_line_(std::move(on_line)) {}

  /// Takes bytes as they come; calls back for each line they complete.
  void append(std::string_view bytes);
  /// Gives out a last line that has no newline.
  void finish();

 private:
  OnLine on_line_;
  std::string partial_;
};

/// The last lines of a stream.
class LineTail {
 public:
  static constexpr size_t kMaxLines = 20;
  /// How much is kept of one line.
  static constexpr size_t kMaxLineBytes = 2048;

  void push(std::string_view line);
  std::vector<std::string> lines() const {
    return {lines_.begin(), lines_.end()};
  }

 private:
  std::deque<std::string> lines_;
};

/// A line that begins with this (return and erase) is live: it shows progress
/// until the next live line replaces it.
inline constexpr std::string_view kLiveLine = "\r\x1b[K";

/// "[ 3] " for rank 3 where the largest rank has two digits.
std::string rank_prefix(int rank, int world_size);

} // namespace tessera::launch
