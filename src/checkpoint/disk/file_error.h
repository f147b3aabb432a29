#pragma once

#include <stdexcept>
#include <string>

namespace tessera::checkpoint {

/// What went wrong with a file or folder; what() names it and says what to do.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The system does not let us at a file; that says nothing about its bytes.
class AccessError : public FileError {
 public:
  using FileError::FileError;
};

/// What is sound, as far as one can tell, but cannot be read here.
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
