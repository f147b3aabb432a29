// A folder that appears whole or not at all.
#pragma once

#include <filesystem>

#include "checkpoint/store/files.h"

namespace tessera::checkpoint {

/// [Note: whole or not at all]
///
/// `parent/NAME` is written as `parent/.NAME.partial` and renamed at the end,
/// when all files and the folder itself are synced. A crash leaves at most the
/// partial folder, which nobody reads and the next save to the same place
/// removes. Where NAME is there already, the two folders change their names in
/// one step, and the old one is removed under the partial name; a file system
/// that cannot do this is refused before anything is written.
///
/// The partial folder is locked (flock) while its writer lives: a second job
/// that saves to the same place is told so, one that comes after a crash is
/// not hindered.
class FolderWriter {
 public:
  /// Makes the partial folder. Throws FileError if `folder` is there and
  /// `overwrite` is false, if another process is writing it, if the parent is
  /// missing or cannot be written. Only what looks like a checkpoint is ever
  /// overwritten: a folder with other files in it is refused.
  FolderWriter(const fs::path& folder, bool overwrite);
  /// Removes the partial folder, if it is there.
  ~FolderWriter();
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  /// Where files go until then.
  const fs::path& partial() const {
    return partial_;
  }
  static fs::path partial_of(const fs::path& folder);

  /// Removes a partial folder that a crash left behind, of which nobody knows
  /// any more; not one that is being written.
  static void remove_if_stale(const fs::path& partial);

  /// All files are written and synced: syncs the folder, gives it its name,
  /// syncs the parent.
  void commit();

 private:
  void clear() noexcept;

  fs::path folder_;
  fs::path partial_;
  UniqueFd lock_; // of what is called partial_, and must go
  bool replaces_ = false;
};

} // namespace tessera::checkpoint
