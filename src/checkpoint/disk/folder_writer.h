// A folder that appears complete or not at all.
#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/disk/files.h"
#include "checkpoint/disk/partial_folder.h"

namespace tessera::checkpoint {

/// [Note: replacing a folder]
///
/// If NAME exists already, the new folder and the old one change their names in
/// one step (RENAME_EXCHANGE), and the old one is removed. NFS, Lustre and some
/// other file systems do not support this. There the old folder becomes
/// `.NAME.old`, the new one becomes NAME, and then the old one is removed.
/// Between the two renames NAME does not exist: Source::open() then opens
/// `.NAME.old`, other programs find nothing. A crash at that moment leaves
/// `.NAME.old`; the next writer first gives that folder its name back.
///
/// See also [Note: whole or not at all] in partial_folder.h.
class FolderWriter {
 public:
  /// Throws FileError if `folder` exists and `overwrite` is false, if another
  /// process is writing it, if the parent is missing or cannot be written. Only
  /// what looks like a checkpoint is ever overwritten: a folder with other
  /// files in it is refused.
  FolderWriter(const fs::path& folder, bool overwrite);
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  /// The folder that files are written to until commit(); removed together with
  /// the writer.
  const fs::path& partial() const {
    return partial_->path();
  }

  /// Call it when all files are written and synced. Syncs the folder, gives it
  /// its name, and syncs the parent.
  void commit();

  /// `parent/.NAME.old`.
  static fs::path aside_of(const fs::path& folder);
  /// Gives a folder that a crash left at `.NAME.old` its name back, or removes
  /// it if a new folder has that name. Throws FileError while a process of this
  /// host is writing there.
  static void recover(const fs::path& folder);

 private:
  void check_target(bool overwrite);
  void replace_in_two_steps();

  fs::path folder_;
  std::optional<PartialFolder> partial_;
  bool replaces_ = false;
  bool can_exchange_ = true;
};

} // namespace tessera::checkpoint
