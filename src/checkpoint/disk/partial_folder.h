// The folder that something is written to until it is complete.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/disk/files.h"

namespace tessera::checkpoint {

/// [Note: whole or not at all]
///
/// What is to appear as `parent/NAME` is written below `parent/.NAME.partial`,
/// synced, and renamed at the end. A crash leaves at most that folder, which
/// nobody reads and the next save to the same place removes.
///
/// The folder is locked (flock) while its writer lives, so that a second job
/// that writes to the same place gets an error. The files do not depend on the
/// lock, which may hold on one host only on NFS and Lustre. Each writer
/// therefore writes under a name that no other writer has, made of the host's
/// boot id and a random number. What a writer renames is what it has written
/// itself; two writers on two hosts can at most replace one complete result
/// with the other.
///
/// If the lock of a `.NAME.partial` is free, entries in it that are of this
/// host were left by a crash, since locks are known to work within one host.
/// Entries of another host may still be in use; they are removed when nothing
/// in them has changed for an hour.
class PartialFolder {
 public:
  /// Prepares to write `target`. Throws FileError if another process is writing
  /// it, or if the parent is missing or cannot be written.
  explicit PartialFolder(const fs::path& target);
  /// Removes what is at path(), and the folder around it.
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  /// Where to write a file or a folder; nothing exists there yet.
  const fs::path& path() const {
    return path_;
  }
  /// Does what the destructor does, but throws FileError.
  void clear();

  /// `parent/.NAME.partial`.
  static fs::path of(const fs::path& target);
  /// Removes what crashes left in such a folder, and the folder itself if it is
  /// then empty. Does nothing while a process of this host is writing there.
  static void remove_if_stale(const fs::path& partial);
  /// For tests: the host that this process belongs to from now on, as 12
  /// hexadecimal digits; empty for the real one.
  static void set_host_for_testing(const std::string& host);

 private:
  fs::path folder_;
  fs::path path_;
  UniqueFd lock_; // of folder_; none: nothing is left to remove
};

} // namespace tessera::checkpoint
