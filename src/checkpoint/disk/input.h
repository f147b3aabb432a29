// Files to read from: regular ones, below a folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/error.h"
#include "checkpoint/format/random_bytes.h"

namespace tessera::checkpoint {

/// In quotes, for messages.
std::string quoted(const fs::path& path);
/// The first few, in quotes, and how many more: for messages.
std::string listed(const std::vector<std::string>& names);

/// The path without symbolic links. Throws FileError if it is not there.
fs::path resolve(const fs::path& path);
/// The same for a checkpoint that may just be replaced by another one: see
/// [Note: replacing a folder].
fs::path resolve_checkpoint(const fs::path& path);

/// `name` below `root`, which is resolved already; resolved. Throws FileError
/// if it is missing, or if symbolic links lead out of `root`.
fs::path resolve_below(const fs::path& root, const std::string& name);

/// A regular file, open for reading.
struct Input {
  UniqueFd file;
  uint64_t bytes = 0;
};
/// `path` is a resolved one. Throws FileError, also for what is no regular
/// file.
Input open_input(const fs::path& path);

/// Throws FileError if the file ends too early.
void read_at(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint8_t* to,
    uint64_t bytes);

/// All of a file that describes others. Throws FileError for one of more than
/// 1 GiB.
std::vector<uint8_t> read_description(const fs::path& path);

/// A part of a file, of which little is looked at; it must lie within the file.
/// `file` must outlive it.
///
/// Files are never mapped: a mapping of a file that another process cuts off
/// ends this one with SIGBUS, where a read is an error.
format::RandomBytes part_of(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint64_t bytes);

/// What `parse` returns. A FormatError becomes a FileError that says where, an
/// UnsupportedFormat an UnsupportedError.
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
