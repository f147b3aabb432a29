#pragma once

#include <stdexcept>
#include <string>

namespace tessera::checkpoint {

/// An error with a file or folder; what() names the file or folder and says
/// what to do.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The system denies access to a file; its bytes may be sound.
class AccessError : public FileError {
 public:
  using FileError::FileError;
};

/// A file that seems sound but uses something that is not supported.
class UnsupportedError : public FileError {
 public:
  using FileError::FileError;
};

/// Bytes that are not those that were written.
class DamageError : public FileError {
 public:
  using FileError::FileError;
};

} // namespace tessera::checkpoint
