#pragma once

#include <tessera/api.h>
#include <tessera/data/error.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace tessera::data {

/// Tokens in a file (docs/formats/token-file.md), read where they lie: only
/// what is used is read, and the ranks of a host share the system's cache. A
/// file that becomes shorter while it is open is an error of the read that
/// notices, and never ends the process.
///
/// A cheap handle; copies share the open file. Thread safety: read() may be
/// called by several threads at once.
class TESSERA_API TokenFile {
 public:
  /// Opens a file and checks its header and its length. Throws DataError, with
  /// the path. Not collective.
  explicit TokenFile(const std::filesystem::path& path);

  /// The number of tokens.
  int64_t size() const {
    return size_;
  }
  /// Tokens are 0 to vocabulary() - 1.
  int64_t vocabulary() const {
    return vocabulary_;
  }
  /// As it was passed.
  const std::filesystem::path& path() const;

  /// Copies tokens `first` to `first + to.size() - 1`. Throws c10::IndexError
  /// beyond the last token, and DataError if the file has become shorter,
  /// cannot be read, or has a token that is not below vocabulary(): the model
  /// would read beyond its embedding.
  void read(int64_t first, std::span<int64_t> to) const;

 private:
  struct OpenFile;
  std::shared_ptr<const OpenFile> file_;
  int64_t size_ = 0;
  int64_t vocabulary_ = 0;
  int64_t token_bytes_ = 0;
};

/// Writes a token file bit by bit. The file appears complete, in close(), or
/// not at all. Tokens take 2 bytes if `vocabulary` is at most 65536, otherwise
/// 4.
///
///   TokenFileWriter writer("train.tokens", tokenizer.vocabulary());
///   for (...) writer.append(tokens);
///   writer.close();
///
/// Not thread-safe, not collective: one rank writes a file.
class TESSERA_API TokenFileWriter {
 public:
  /// Begins "PATH.partial". Throws c10::ValueError unless `vocabulary` is 1 to
  /// 2^31, and DataError if the file cannot be written.
  TokenFileWriter(const std::filesystem::path& path, int64_t vocabulary);
  /// Removes the partial file if close() was not called.
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  /// Adds tokens. Throws c10::ValueError, and adds none of them, if one is not
  /// from 0 to vocabulary - 1; DataError if they cannot be written. After that
  /// error the file cannot be completed: append() and close() throw.
  void append(std::span<const int32_t> tokens);
  void append(std::span<const int64_t> tokens);
  /// The number of tokens so far.
  int64_t size() const;
  /// Completes the file, syncs it to the disk and gives it its name, in place
  /// of a file that has the name. Throws DataError.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera::data
