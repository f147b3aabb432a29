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
  Open, // to read a file, or to list a folder
  MakeFolder,
  Lock,
  Create,
  Write,
  Sync,
  SyncFolder,
  Rename,
  Exchange,
  Remove,
};
const char* name_of(FileOp op);

/// Called before each operation. Returns the error that the operation fails
/// with, or 0 to let it proceed. For tests; the function may also kill the
/// process or change files itself. Reading threads call it concurrently.
using FileFault = std::function<int(FileOp op, const fs::path& path)>;
/// Must not be called while files are being written. An empty function lets
/// every operation proceed.
void set_file_fault(FileFault fault);
/// The fault's answer for opening a file; 0 if no fault is set.
int opening_fault(const fs::path& path);

/// All of these throw FileError with the path and the system's reason.

/// A new file, open for writing; it must not exist yet.
UniqueFd create_file(const fs::path& path);
/// Writes all parts, one after another, at `offset`. Changes `parts`.
void write_all(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    std::vector<iovec>& parts);
/// Writes a whole small file and syncs it.
void write_file(const fs::path& path, std::string_view bytes);
/// True for a link that leads nowhere, too.
bool is_there(const fs::path& path);
void sync_file(const UniqueFd& file, const fs::path& path);
void sync_folder(const fs::path& path);
void make_folder(const fs::path& path); // its parent must exist
/// False if it existed already.
bool make_folder_if_missing(const fs::path& path);
/// Locks the file (flock) until it is closed. False if another process of this
/// host has the lock. Also true if the file system does not support locks; a
/// lock held on another host may go unnoticed.
bool lock_file(const UniqueFd& file, const fs::path& path);
void rename_path(const fs::path& from, const fs::path& to);
/// Exchanges the names of two folders in one step. False if the file system
/// does not support it.
bool exchange_paths(const fs::path& a, const fs::path& b);
/// Removes a file, or a folder with everything in it; does nothing if it does
/// not exist. Links are removed, not followed.
void remove_path(const fs::path& path);
/// Removes a folder if it exists and is empty.
void remove_folder_if_empty(const fs::path& path);

/// "No space left on device".
std::string system_reason(int error);

} // namespace tessera::checkpoint
