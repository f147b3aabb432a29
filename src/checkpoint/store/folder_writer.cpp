#include "checkpoint/store/folder_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "checkpoint/store/file_error.h"

namespace tessera::checkpoint {

namespace {

std::string quoted(const fs::path& path) {
  return "\"" + path.string() + "\"";
}

/// Locks the folder, or throws if another process has it.
UniqueFd lock_folder(const fs::path& partial, const fs::path& folder) {
  UniqueFd lock(
      ::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!lock) {
    throw FileError(
        "cannot open " + quoted(partial) + ": " + system_reason(errno) +
        ". Remove it.");
  }
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) < 0) {
    if (errno == EWOULDBLOCK) {
      throw FileError(
          "another save to " + quoted(folder) +
          " is under way, here or in another process. Wait for it, and let each job save to a folder of its own.");
    }
    if (errno != ENOSYS && errno != ENOTSUP && errno != ENOLCK) {
      throw FileError(
          "cannot lock " + quoted(partial) + ": " + system_reason(errno) + ".");
    }
    // A file system without locks: nobody can be warned.
  }
  // Somebody may have renamed it before the lock was ours.
  struct stat mine {};
  struct stat named {};
  if (::fstat(lock.get(), &mine) < 0 || ::stat(partial.c_str(), &named) < 0 ||
      mine.st_ino != named.st_ino || mine.st_dev != named.st_dev) {
    throw FileError(
        "another process has just saved to " + quoted(folder) +
        ". Let each job save to a folder of its own.");
  }
  return lock;
}

void check_replaceable(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw FileError(
        quoted(folder) +
        " is there and is no folder. Remove it, or save elsewhere.");
  }
  if (!fs::is_empty(folder) && !fs::exists(folder / ".metadata")) {
    throw FileError(
        quoted(folder) +
        " has files in it that are no checkpoint; they would be lost. "
        "Save elsewhere.");
  }
}

/// Tries what commit() will need, on two folders of our own.
void check_exchange(const fs::path& partial, const fs::path& folder) {
  const fs::path a = partial / "a";
  const fs::path b = partial / "b";
  make_folder(a);
  make_folder(b);
  const bool can = exchange_paths(a, b);
  remove_path(a);
  remove_path(b);
  if (!can) {
    throw FileError(
        "the file system of " + quoted(folder) +
        " cannot exchange two folders in one step, so replacing it could lose "
        "both. Save to a new folder, or remove this one first.");
  }
}

} // namespace

fs::path FolderWriter::partial_of(const fs::path& folder) {
  return folder.parent_path() / ("." + folder.filename().string() + ".partial");
}

FolderWriter::FolderWriter(const fs::path& folder, bool overwrite)
    : folder_(fs::absolute(folder).lexically_normal()) {
  if (folder_.filename().empty()) { // "runs/step_5/"
    folder_ = folder_.parent_path();
  }
  partial_ = partial_of(folder_);
  if (fs::is_symlink(folder_)) {
    throw FileError(
        quoted(folder_) +
        " is a symbolic link, which cannot be replaced by a folder. Save to what it stands for, or remove it.");
  }
  if (fs::exists(fs::symlink_status(folder_))) {
    check_replaceable(folder_);
    replaces_ = !fs::is_empty(folder_); // an empty one rename() replaces
    if (replaces_ && !overwrite) {
      throw FileError(
          quoted(folder_) +
          " has a checkpoint already. Save elsewhere, or ask for overwrite.");
    }
  }
  make_folder_if_missing(partial_);
  lock_ = lock_folder(partial_, folder_);
  try {
    // What a crash left there.
    for (const auto& entry : fs::directory_iterator(partial_)) {
      remove_path(entry.path());
    }
    if (replaces_) {
      check_exchange(partial_, folder_);
    }
  } catch (...) {
    clear();
    throw;
  }
}

void FolderWriter::remove_if_stale(const fs::path& partial) {
  const UniqueFd lock(
      ::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) {
    remove_path(partial);
  }
}

FolderWriter::~FolderWriter() {
  clear();
}

void FolderWriter::clear() noexcept {
  if (lock_) {
    try {
      remove_path(partial_);
    } catch (const FileError&) {
      // It stays for the next save to remove; nobody reads it.
    }
    lock_.reset();
  }
}

void FolderWriter::commit() {
  sync_folder(partial_);
  if (!replaces_) {
    rename_path(partial_, folder_);
    lock_.reset(); // the name may be another's by now
  } else {
    // The old folder gets the partial name, under which others look for it.
    UniqueFd old_lock = lock_folder(folder_, folder_);
    if (!exchange_paths(partial_, folder_)) {
      throw FileError("cannot replace " + quoted(folder_) + ".");
    }
    lock_ = std::move(old_lock);
  }
  sync_folder(folder_.parent_path());
  if (replaces_) {
    remove_path(partial_);
    lock_.reset();
  }
}

} // namespace tessera::checkpoint
