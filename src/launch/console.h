#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace tessera::launch {

enum class Stream { Stdout, Stderr };

/// Buffered lines on their way to one file, written without blocking.
class ConsoleSink {
 public:
  /// Borrows `fd`. `name` is for messages ("standard output").
  ConsoleSink(int fd, std::string name);

  void append(std::string_view text);
  /// Writes what the file takes now. After an error everything is dropped.
  void write_some();

  bool pending() const {
    return written_ < buffer_.size();
  }
  size_t pending_bytes() const {
    return buffer_.size() - written_;
  }
  int fd() const {
    return own_fd_ ? own_fd_.get() : fd_;
  }
  /// Empty, or what went wrong.
  const std::string& error() const {
    return error_;
  }

 private:
  void fail(int error);

  std::string name_;
  int fd_;
  // The same file opened again without blocking. The flag cannot be set on
  // fd_: it would change the terminal for the user's shell as well.
  UniqueFd own_fd_;
  bool may_block_ = false;
  std::string buffer_;
  size_t written_ = 0;
  std::string error_;
};

/// The launcher's standard output and standard error. Text reaches a file in
/// the order it was written here, whole line after whole line, also where both
/// are the same file. Nothing blocks; a slow reader shows as congested().
///
/// On a terminal there may be a live line below all other lines, which the next
/// live line replaces.
class Console {
 public:
  /// Borrows the descriptors.
  Console(int out_fd, int err_fd);

  /// `lines` ends with a newline.
  void write(Stream stream, std::string_view lines);

  /// The width of the terminal; 0 if standard output is not a terminal, and
  /// live lines are not shown.
  int live_columns() const {
    return live_columns_;
  }
  /// Replaces the live line, cut to the terminal's width; empty: wipes it away.
  void set_live(std::string_view line);

  /// Whether so much is waiting that no more output should be produced.
  bool congested() const;
  bool pending() const;
  /// Adds the files that have something waiting.
  void add_to_poll(std::vector<pollfd>* fds) const;
  /// Writes what can be written now.
  void write_some();
  /// Empty, or what is wrong with the first file that failed. Later output to
  /// that file is lost.
  std::string error() const;

 private:
  std::vector<std::unique_ptr<ConsoleSink>> sinks_;
  ConsoleSink* out_;
  ConsoleSink* err_;
  const int live_columns_;
  std::string live_;
};

} // namespace tessera::launch
