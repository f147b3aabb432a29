// Every change that checkpoints make to a file system goes through here, and
// every opening of what they read asks here first: one place where tests can
// make any of them fail, or let another process come in between.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

enum class FileOp {
  kOpen, // to read a file, or to list a folder
  kMakeFolder,
  kLock,
  kCreate,
  kWrite,
  kSync,
  kSyncFolder,
  kRename,
  kExchange,
  kRemove,
};
const char* name_of(FileOp op);

/// Called before each operation. What it returns is the error the operation
/// fails with, 0 lets it happen. For tests; it may also kill the process, or
/// change files itself. Threads that read call it at the same time.
using FileFault = std::function<int(FileOp op, const fs::path& path)>;
/// Not while files are being written. An empty one lets everything happen.
void set_file_fault(FileFault fault);
/// What the fault says about an opening; 0 without one.
int opening_fault(const fs::path& path);

/// All of these throw FileError with the path and the system's reason.

/// A new file, open for writing; it must not be there yet.
UniqueFd create_file(const fs::path& path);
/// All the bytes, one after another, at `offset`. Changes `parts`.
void write_all(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    std::vector<iovec>& parts);
/// A whole small file, synced.
void write_file(const fs::path& path, std::string_view bytes);
/// True for a link that leads nowhere, too.
bool is_there(const fs::path& path);
void sync_file(const UniqueFd& file, const fs::path& path);
void sync_folder(const fs::path& path);
void make_folder(const fs::path& path); // its parent must be there
/// False if it was there already.
bool make_folder_if_missing(const fs::path& path);
/// Locks it (flock) until it is closed. False if another process of this host
/// has the lock. True also where the file system has no locks; those of another
/// host may not be seen.
bool lock_file(const UniqueFd& file, const fs::path& path);
void rename_path(const fs::path& from, const fs::path& to);
/// Each gets the other's name, in one step. False where the file system cannot.
bool exchange_paths(const fs::path& a, const fs::path& b);
/// A file, or a folder with all that is in it; nothing if it is not there.
/// Links are removed, not followed.
void remove_path(const fs::path& path);
/// Leaves a folder alone that has something in it, or is not there.
void remove_folder_if_empty(const fs::path& path);

/// "No space left on device".
std::string system_reason(int error);

} // namespace tessera::checkpoint
