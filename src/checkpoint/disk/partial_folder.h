// Where something is written until it is whole.
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
/// that writes to the same place is told. The lock is not what the files depend
/// on: on NFS and Lustre it may hold on one host only. Each writer therefore
/// writes under a name that no other writer has, made of the host's boot id and
/// a random number. What a writer renames is what it has written itself; two
/// writers on two hosts can at most replace one whole result by the other.
///
/// What is below a `.NAME.partial` whose lock is free was left by a crash if it
/// is of this host, where locks are known to work. What is of another host may
/// be under way, and is removed when nothing in it has changed for an hour.
class PartialFolder {
 public:
  /// For what is to become `target`. Throws FileError if another process is
  /// writing it, or if the parent is missing or cannot be written.
  explicit PartialFolder(const fs::path& target);
  /// Removes what is at path(), and the folder around it.
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  /// Where to write: a file or a folder; nothing is there yet.
  const fs::path& path() const {
    return path_;
  }
  /// What the destructor does. Throws FileError.
  void clear();

  /// `parent/.NAME.partial`.
  static fs::path of(const fs::path& target);
  /// Removes what crashes left in such a folder, and the folder if nothing else
  /// is in it; nothing of it while a process of this host is writing there.
  static void remove_if_stale(const fs::path& partial);
  /// Whose processes this one counts as from now on: 12 hexadecimal digits;
  /// empty: this host's again.
  static void set_host_for_testing(const std::string& host);

 private:
  fs::path folder_;
  fs::path path_;
  UniqueFd lock_; // of folder_; none: nothing is left to remove
};

} // namespace tessera::checkpoint
