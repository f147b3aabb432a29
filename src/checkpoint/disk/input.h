// Regular files below a folder, open for reading.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/random_bytes.h"

namespace tessera::checkpoint {

/// The path in quotes, for messages.
std::string quoted(const fs::path& path);
/// The first few names in quotes, and how many more there are, for messages.
std::string listed(const std::vector<std::string>& names);

/// The path without symbolic links. Throws FileError if it does not exist.
fs::path resolve(const fs::path& path);
/// The same for a checkpoint that may be in the middle of being replaced: see
/// [Note: replacing a folder].
fs::path resolve_checkpoint(const fs::path& path);

/// The resolved path of `name` below `root`, which is resolved already. Throws
/// FileError if the file is missing, or if symbolic links lead out of `root`.
fs::path resolve_below(const fs::path& root, const std::string& name);

/// A regular file, open for reading.
struct Input {
  UniqueFd file;
  uint64_t bytes = 0;
};
/// `path` must be resolved. Throws FileError, also if it is not a regular file.
Input open_input(const fs::path& path);

/// Throws FileError if the file ends too early.
void read_at(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint8_t* to,
    uint64_t bytes);

/// Reads all of a file that describes other files. Throws FileError if it is
/// larger than 1 GiB.
std::vector<uint8_t> read_description(const fs::path& path);

/// A part of a file, of which only a little is read; it must lie within the
/// file. `file` must outlive it.
///
/// Files are never mapped: if another process truncates a mapped file, this
/// process dies with SIGBUS, while a read returns an error.
format::RandomBytes part_of(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint64_t bytes);

/// Returns what `parse` returns. A FormatError becomes a FileError that names
/// the file, an UnsupportedFormat becomes an UnsupportedError.
template <class Parse>
auto parsing(const std::string& where, Parse&& parse) {
  try {
    return parse();
  } catch (const format::UnsupportedFormat& error) {
    throw UnsupportedError(where + ": " + error.what());
  } catch (const format::FormatError& error) {
    throw FileError(where + ": " + error.what());
  }
}

} // namespace tessera::checkpoint
