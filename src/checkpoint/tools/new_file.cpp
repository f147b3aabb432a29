#include "checkpoint/tools/new_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "checkpoint/store/file_error.h"
#include "checkpoint/store/folder_writer.h"
#include "checkpoint/store/input.h"

namespace tessera::checkpoint {
namespace {

// Some file systems have no locks; there nobody can be warned.
bool is_locked_by_another(const UniqueFd& file) {
  return ::flock(file.get(), LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
}

[[noreturn]] void fail_as_busy(const fs::path& path) {
  throw FileError(
      "another process is writing " + quoted(path) + " now. Wait for it.");
}

// What a crash left; not what somebody is writing.
fs::path cleared(const fs::path& partial, const fs::path& path) {
  const UniqueFd old(
      ::open(partial.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (old && is_locked_by_another(old)) {
    fail_as_busy(path);
  }
  remove_path(partial);
  return partial;
}

fs::path checked(const fs::path& path, bool overwrite) {
  const auto status = fs::symlink_status(path);
  if (fs::is_directory(status)) {
    throw FileError(
        quoted(path) + " is a folder, and a file is to be written there.");
  }
  if (fs::exists(status) && !overwrite) {
    throw FileError(
        quoted(path) +
        " is there already. Write elsewhere, or give --overwrite.");
  }
  return path;
}

} // namespace

StreamFile::StreamFile(fs::path path)
    : path_(std::move(path)), file_(create_file(path_)) {}

void StreamFile::append(format::ByteSpan bytes) {
  if (bytes.empty()) {
    return;
  }
  sums_.add(bytes);
  std::vector<iovec> parts{{const_cast<uint8_t*>(bytes.data()), bytes.size()}};
  write_all(file_, path_, written_, parts);
  written_ += bytes.size();
}

FileSums StreamFile::finish() {
  sync_file(file_, path_);
  file_.reset();
  return sums_.finish();
}

NewFile::NewFile(const fs::path& path, bool overwrite)
    : path_(checked(fs::absolute(path).lexically_normal(), overwrite)),
      partial_(cleared(FolderWriter::partial_of(path_), path_)),
      stream_(partial_),
      lock_(::dup(stream_.descriptor().get())) {
  if (is_locked_by_another(lock_)) {
    fail_as_busy(path_);
  }
}

NewFile::~NewFile() {
  if (!committed_) {
    try {
      remove_path(partial_);
    } catch (const FileError&) {
      // It stays for the next one to remove; nobody reads it.
    }
  }
}

void NewFile::commit() {
  stream_.finish();
  struct stat mine {};
  struct stat named {};
  if (::fstat(lock_.get(), &mine) < 0 || ::stat(partial_.c_str(), &named) < 0 ||
      mine.st_ino != named.st_ino || mine.st_dev != named.st_dev) {
    committed_ = true; // theirs now
    fail_as_busy(path_);
  }
  rename_path(partial_, path_);
  committed_ = true;
  sync_folder(path_.parent_path());
}

} // namespace tessera::checkpoint
