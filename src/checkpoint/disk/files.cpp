#include "checkpoint/disk/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "checkpoint/disk/file_error.h"

namespace tessera::checkpoint {

namespace {

FileFault& fault() {
  static FileFault instance;
  return instance;
}

/// What to do about an error; empty for errors without an obvious remedy.
const char* advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return " Free some space, or save elsewhere.";
    case EROFS:
    case EACCES:
    case EPERM:
      return " Choose a folder that this user may write to.";
    case ENOENT:
      return " Create its parent folder first.";
    case EIO:
      return " The disk reports an error: look at the system's log.";
    default:
      return "";
  }
}

[[noreturn]] void fail(FileOp op, const fs::path& path, int error) {
  throw FileError(
      std::string("cannot ") + name_of(op) + " \"" + path.string() +
      "\": " + system_reason(error) + "." + advice(error));
}

int fault_of(FileOp op, const fs::path& path) {
  return fault() ? fault()(op, path) : 0;
}

/// Lets a test make the operation fail.
void before(FileOp op, const fs::path& path) {
  if (const int error = fault_of(op, path)) [[unlikely]] {
    fail(op, path, error);
  }
}

/// Repeats a call that a signal interrupted.
template <class F>
auto retrying(F call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

} // namespace

const char* name_of(FileOp op) {
  switch (op) {
    case FileOp::Open:
      return "open";
    case FileOp::MakeFolder:
      return "create the folder";
    case FileOp::Lock:
      return "lock";
    case FileOp::Create:
      return "create";
    case FileOp::Write:
      return "write";
    case FileOp::Sync:
      return "sync";
    case FileOp::SyncFolder:
      return "sync the folder";
    case FileOp::Rename:
      return "rename";
    case FileOp::Exchange:
      return "exchange";
    case FileOp::Remove:
      return "remove";
  }
  return "?";
}

void set_file_fault(FileFault value) {
  fault() = std::move(value);
}

int opening_fault(const fs::path& path) {
  return fault_of(FileOp::Open, path);
}

std::string system_reason(int error) {
  return std::system_category().message(error);
}

UniqueFd create_file(const fs::path& path) {
  before(FileOp::Create, path);
  UniqueFd file(retrying([&] {
    return ::open(
        path.c_str(),
        O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
        0666);
  }));
  if (!file) {
    fail(FileOp::Create, path, errno);
  }
  return file;
}

void write_all(
    const UniqueFd& file,
    const fs::path& path,
    uint64_t offset,
    std::vector<iovec>& parts) {
  before(FileOp::Write, path);
  size_t first = 0;
  while (first < parts.size()) {
    const auto count =
        static_cast<int>(std::min<size_t>(parts.size() - first, IOV_MAX));
    const ssize_t written = retrying([&] {
      return ::pwritev(
          file.get(), &parts[first], count, static_cast<off_t>(offset));
    });
    if (written < 0) {
      fail(FileOp::Write, path, errno);
    }
    offset += static_cast<uint64_t>(written);
    auto left = static_cast<size_t>(written);
    while (first < parts.size() && left >= parts[first].iov_len) {
      left -= parts[first++].iov_len;
    }
    if (left > 0) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + left;
      parts[first].iov_len -= left;
    }
  }
}

void write_file(const fs::path& path, std::string_view bytes) {
  const UniqueFd file = create_file(path);
  std::vector<iovec> parts{{const_cast<char*>(bytes.data()), bytes.size()}};
  write_all(file, path, 0, parts);
  sync_file(file, path);
}

void sync_file(const UniqueFd& file, const fs::path& path) {
  before(FileOp::Sync, path);
  if (retrying([&] { return ::fsync(file.get()); }) < 0) {
    fail(FileOp::Sync, path, errno);
  }
}

void sync_folder(const fs::path& path) {
  before(FileOp::SyncFolder, path);
  const UniqueFd folder(retrying([&] {
    return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }));
  // Some network file systems cannot sync a folder; nothing is lost by trying.
  if (!folder ||
      (retrying([&] { return ::fsync(folder.get()); }) < 0 &&
       errno != EINVAL)) {
    fail(FileOp::SyncFolder, path, errno);
  }
}

void make_folder(const fs::path& path) {
  if (!make_folder_if_missing(path)) {
    fail(FileOp::MakeFolder, path, EEXIST);
  }
}

bool is_there(const fs::path& path) {
  return fs::exists(fs::symlink_status(path));
}

bool make_folder_if_missing(const fs::path& path) {
  before(FileOp::MakeFolder, path);
  if (::mkdir(path.c_str(), 0777) == 0) {
    return true;
  }
  if (errno == EEXIST) {
    return false;
  }
  fail(FileOp::MakeFolder, path, errno);
}

void rename_path(const fs::path& from, const fs::path& to) {
  before(FileOp::Rename, to);
  if (::rename(from.c_str(), to.c_str()) < 0) {
    fail(FileOp::Rename, to, errno);
  }
}

bool lock_file(const UniqueFd& file, const fs::path& path) {
  int error = fault_of(FileOp::Lock, path);
  if (error == 0 &&
      retrying([&] { return ::flock(file.get(), LOCK_EX | LOCK_NB); }) < 0) {
    error = errno;
  }
  switch (error) {
    case 0:
    case ENOSYS:
    case ENOTSUP:
    case ENOLCK:
      return true;
    case EWOULDBLOCK:
      return false;
    default:
      fail(FileOp::Lock, path, error);
  }
}

bool exchange_paths(const fs::path& a, const fs::path& b) {
  int error = fault_of(FileOp::Exchange, b);
  if (error == 0 &&
      ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) <
          0) {
    error = errno;
  }
  switch (error) {
    case 0:
      return true;
    case EINVAL: // NFS, Lustre
    case ENOSYS:
    case ENOTSUP:
      return false;
    default:
      fail(FileOp::Exchange, b, error);
  }
}

void remove_path(const fs::path& path) {
  before(FileOp::Remove, path);
  std::error_code error;
  fs::remove_all(path, error);
  if (error) {
    fail(FileOp::Remove, path, error.value());
  }
}

void remove_folder_if_empty(const fs::path& path) {
  before(FileOp::Remove, path);
  if (::rmdir(path.c_str()) < 0 && errno != ENOENT && errno != ENOTEMPTY &&
      errno != EEXIST) {
    fail(FileOp::Remove, path, errno);
  }
}

} // namespace tessera::checkpoint
