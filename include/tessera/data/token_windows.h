#pragma once

#include <tessera/api.h>
#include <tessera/data/token_file.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

namespace tessera::data {

/// What a language model learns from.
struct TESSERA_API TokenBatch {
  at::Tensor inputs; // (rows, length) int64; of one window: (length)
  at::Tensor targets; // the same, each the token that follows
};

/// Windows of a fixed length in a token file, as a data set for Loader.
///
/// Thread safety: const functions may be called by several threads at once.
class TESSERA_API TokenWindows {
 public:
  /// All windows, one after another; tokens at the end that do not fill a
  /// window and its last target are left out. Throws c10::ValueError if
  /// `length` is below 1 or the file is too short for a single window.
  TokenWindows(TokenFile file, int64_t length);
  /// `count` windows whose beginnings are spread evenly over the file, from its
  /// first token to its last; they overlap if the file is short. For
  /// evaluation. Throws likewise, and if `count` is below 1.
  static TokenWindows spread(TokenFile file, int64_t length, int64_t count);

  /// The number of windows.
  int64_t size() const {
    return size_;
  }
  /// Tokens in a window.
  int64_t length() const {
    return length_;
  }
  /// Where the windows are.
  const TokenFile& file() const {
    return file_;
  }
  /// The path of the file.
  std::string name() const;

  /// One window, and several as rows. Throw as TokenFile::read() does.
  TokenBatch get(int64_t index) const;
  TokenBatch read(std::span<const int64_t> indices) const;

 private:
  int64_t start_of(int64_t index) const;

  TokenFile file_;
  int64_t length_ = 0;
  int64_t size_ = 0;
  bool is_spread_ = false;
};

} // namespace tessera::data
