// A folder that appears whole or not at all.
#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/disk/files.h"
#include "checkpoint/disk/partial_folder.h"

namespace tessera::checkpoint {

/// [Note: replacing a folder]
///
/// Where NAME is there already, the new folder and the old one change their
/// names in one step (RENAME_EXCHANGE), and the old one is removed. NFS, Lustre
/// and some others cannot do this. There the old folder becomes `.NAME.old`,
/// the new one NAME, then the old one is removed. Between the two renames NAME
/// is not there: Source::open() takes `.NAME.old` then, other programs find
/// nothing. A crash in this moment leaves `.NAME.old`, which the next writer
/// gives its name back before anything else.
///
/// See also [Note: whole or not at all].
class FolderWriter {
 public:
  /// Throws FileError if `folder` is there and `overwrite` is false, if another
  /// process is writing it, if the parent is missing or cannot be written. Only
  /// what looks like a checkpoint is ever overwritten: a folder with other
  /// files in it is refused.
  FolderWriter(const fs::path& folder, bool overwrite);
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  /// The folder where files go until then; it is removed with the writer.
  const fs::path& partial() const {
    return partial_->path();
  }

  /// All files are written and synced: syncs the folder, gives it its name,
  /// syncs the parent.
  void commit();

  /// `parent/.NAME.old`.
  static fs::path aside_of(const fs::path& folder);
  /// What a crash left at `.NAME.old` gets its name back, or is removed if a
  /// new folder has it. Not while a process of this host is writing there.
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
