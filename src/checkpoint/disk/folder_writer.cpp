#include "checkpoint/disk/folder_writer.h"

#include <string>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/input.h"

namespace tessera::checkpoint {

namespace {

void check_replaceable(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw FileError(
        quoted(folder) +
        " exists and is not a folder. Remove it, or save elsewhere.");
  }
  if (!fs::is_empty(folder) && !fs::exists(folder / ".metadata")) {
    throw FileError(
        quoted(folder) +
        " contains files that are not part of a checkpoint; they would be lost. "
        "Save elsewhere.");
  }
}

/// Tries on two folders of our own what commit() will need.
bool can_exchange_in(const fs::path& partial) {
  const fs::path a = partial / "a";
  const fs::path b = partial / "b";
  make_folder(a);
  make_folder(b);
  const bool can = exchange_paths(a, b);
  remove_path(a);
  remove_path(b);
  return can;
}

/// True if the old folder has its name again. The place is locked.
bool recover_aside(const fs::path& folder) {
  const fs::path aside = FolderWriter::aside_of(folder);
  if (!is_there(aside)) {
    return false;
  }
  if (is_there(folder)) {
    remove_path(aside);
    return false;
  }
  rename_path(aside, folder);
  sync_folder(folder.parent_path());
  return true;
}

} // namespace

fs::path FolderWriter::aside_of(const fs::path& folder) {
  return folder.parent_path() / ("." + folder.filename().string() + ".old");
}

void FolderWriter::recover(const fs::path& folder) {
  const PartialFolder lock(folder);
  recover_aside(folder);
}

FolderWriter::FolderWriter(const fs::path& folder, bool overwrite)
    : folder_(fs::absolute(folder).lexically_normal()) {
  if (folder_.filename().empty()) { // "runs/step_5/"
    folder_ = folder_.parent_path();
  }
  check_target(overwrite);
  partial_.emplace(folder_);
  if (recover_aside(folder_)) {
    check_target(overwrite);
  }
  make_folder(partial());
  if (replaces_) {
    can_exchange_ = can_exchange_in(partial());
  }
}

void FolderWriter::check_target(bool overwrite) {
  if (fs::is_symlink(folder_)) {
    throw FileError(
        quoted(folder_) +
        " is a symbolic link, which cannot be replaced by a folder. Save to its target, or remove it.");
  }
  if (!is_there(folder_)) {
    return;
  }
  check_replaceable(folder_);
  replaces_ = !fs::is_empty(folder_); // rename() replaces an empty folder
  if (replaces_ && !overwrite) {
    throw FileError(
        quoted(folder_) +
        " has a checkpoint already. Save elsewhere, or ask for overwrite.");
  }
}

void FolderWriter::commit() {
  sync_folder(partial());
  if (!replaces_) {
    rename_path(partial(), folder_);
  } else if (!can_exchange_) {
    replace_in_two_steps();
  } else if (!exchange_paths(partial(), folder_)) {
    throw FileError("cannot replace " + quoted(folder_) + ".");
  }
  try {
    sync_folder(folder_.parent_path());
    if (replaces_ && !can_exchange_) {
      remove_path(aside_of(folder_));
    }
    partial_->clear(); // after an exchange, the old folder
  } catch (const FileError& error) {
    throw FileError(
        std::string(error.what()) +
        " The new checkpoint is in place; the next save removes what is left.");
  }
}

void FolderWriter::replace_in_two_steps() {
  const fs::path aside = aside_of(folder_);
  rename_path(folder_, aside);
  try {
    rename_path(partial(), folder_);
  } catch (const FileError& error) {
    try {
      rename_path(aside, folder_);
    } catch (const FileError&) {
      throw FileError(
          std::string(error.what()) + " The old checkpoint is " +
          quoted(aside) +
          " now, is loaded from there, and gets its name back at the next save.");
    }
    throw;
  }
}

} // namespace tessera::checkpoint
