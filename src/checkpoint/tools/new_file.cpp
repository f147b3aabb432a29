#include "checkpoint/tools/new_file.h"

#include <utility>
#include <vector>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/input.h"

namespace tessera::checkpoint {
namespace {

fs::path checked(const fs::path& path, bool overwrite) {
  const auto status = fs::symlink_status(path);
  if (fs::is_directory(status)) {
    throw FileError(
        quoted(path) + " is a folder, but a file is to be written there.");
  }
  if (fs::exists(status) && !overwrite) {
    throw FileError(
        quoted(path) +
        " exists already. Write elsewhere, or give --overwrite.");
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
      partial_(path_),
      stream_(partial_.path()) {}

void NewFile::commit() {
  stream_.finish();
  rename_path(partial_.path(), path_);
  sync_folder(path_.parent_path());
  partial_.clear();
}

} // namespace tessera::checkpoint
