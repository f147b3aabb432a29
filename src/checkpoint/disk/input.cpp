#include "checkpoint/disk/input.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/partial_folder.h"

namespace tessera::checkpoint {
namespace {

// A sentence about an unfinished save to `path`, if there is one.
std::string partial_hint(const fs::path& path) {
  const fs::path partial = PartialFolder::of(path);
  std::error_code ignored;
  return fs::exists(partial, ignored)
      ? " A save is under way or was interrupted: there is " + quoted(partial) +
          ", which is not complete."
      : "";
}

/// The exception for the system's `error`: a missing file or a failing disk is
/// damage, any other error says nothing about the file.
[[noreturn]] void fail(int error, const std::string& text) {
  if (error == ENOENT || error == ENOTDIR || error == EIO) {
    throw FileError(text);
  }
  throw AccessError(text);
}

} // namespace

std::string quoted(const fs::path& path) {
  // in_quotes() cuts long texts, but a path must be readable to its end.
  const std::string text = path.string();
  return std::all_of(
             text.begin(),
             text.end(),
             [](unsigned char c) { return c >= ' ' && c != 127; })
      ? '"' + text + '"'
      : format::in_quotes(text);
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    text += (i > 0 ? ", " : "") + format::in_quotes(names[i]);
  }
  if (names.size() > kMost) {
    text += " and " + std::to_string(names.size() - kMost) + " more";
  }
  return text;
}

fs::path resolve(const fs::path& path) {
  std::error_code error;
  fs::path resolved = fs::canonical(path, error);
  if (error) {
    fail(
        error.value(),
        quoted(path) + ": " + error.message() + "." + partial_hint(path));
  }
  return resolved;
}

fs::path resolve_checkpoint(const fs::path& path) {
  fs::path named = path;
  if (named.filename().empty()) { // "runs/step_5/"
    named = named.parent_path();
  }
  // If neither exists, the new one may have appeared in between.
  for (const fs::path& candidate : {path, FolderWriter::aside_of(named)}) {
    std::error_code error;
    fs::path resolved = fs::canonical(candidate, error);
    if (!error) {
      return resolved;
    }
    if (error != std::errc::no_such_file_or_directory) {
      break;
    }
  }
  return resolve(path);
}

fs::path resolve_below(const fs::path& root, const std::string& name) {
  const fs::path path = root / name;
  std::error_code error;
  fs::path resolved = fs::canonical(path, error);
  if (error == std::errc::no_such_file_or_directory) {
    throw FileError(
        quoted(path) +
        ": this file is missing. The checkpoint is not complete: copy it again, or use another one.");
  }
  if (error) {
    fail(error.value(), quoted(path) + ": " + error.message());
  }
  const auto ends =
      std::mismatch(root.begin(), root.end(), resolved.begin(), resolved.end());
  if (ends.first != root.end()) {
    throw FileError(
        quoted(path) + ": a symbolic link leads out of the folder, to " +
        quoted(resolved) +
        ". Such links are not followed; if you trust it, copy the folder with `cp -rL`.");
  }
  return resolved;
}

Input open_input(const fs::path& path) {
  if (const int error = opening_fault(path)) {
    fail(error, quoted(path) + ": " + system_reason(error));
  }
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  UniqueFd file(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) {
    fail(errno, quoted(path) + ": " + system_reason(errno));
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) {
    fail(errno, quoted(path) + ": " + system_reason(errno));
  }
  if (!S_ISREG(status.st_mode)) {
    throw FileError(quoted(path) + ": this is not a regular file");
  }
  return {
      .file = std::move(file), .bytes = static_cast<uint64_t>(status.st_size)};
}

void read_at(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint8_t* to,
    uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t count =
        ::pread(file.get(), to, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      fail(
          errno,
          quoted(path) + ": byte " + std::to_string(offset) +
              " cannot be read: " + system_reason(errno));
    }
    if (count == 0) {
      throw FileError(
          quoted(path) + ": the file ends at byte " + std::to_string(offset) +
          ", " + std::to_string(bytes) +
          " more are needed. Was it cut off, or is it being written?");
    }
    offset += static_cast<uint64_t>(count);
    to += count;
    bytes -= static_cast<uint64_t>(count);
  }
}

std::vector<uint8_t> read_description(const fs::path& path) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 30;
  const Input input = open_input(path);
  if (input.bytes > kMostBytes) {
    throw FileError(
        quoted(path) + ": " + std::to_string(input.bytes) +
        " bytes, which is more than such a file can need. Is it something else?");
  }
  std::vector<uint8_t> bytes(input.bytes);
  read_at(input.file, path, 0, bytes.data(), bytes.size());
  return bytes;
}

format::RandomBytes part_of(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    uint64_t bytes) {
  return {
      bytes,
      [&file, path, offset](uint64_t place, uint8_t* to, uint64_t length) {
        read_at(file, path, offset + place, to, length);
      }};
}

} // namespace tessera::checkpoint
