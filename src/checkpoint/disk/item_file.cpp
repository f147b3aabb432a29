#include "checkpoint/disk/item_file.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/item_frame.h"

namespace tessera::checkpoint {

namespace {

/// The system is asked to start writing after this many bytes, so that little
/// is left to do when the file is synced.
constexpr uint64_t kWriteBehind = uint64_t{32} << 20;

} // namespace

ItemFile::ItemFile(fs::path path)
    : path_(std::move(path)), file_(create_file(path_)) {}

ItemFile::~ItemFile() = default;

ItemPlace ItemFile::add_value(const format::Value& value) {
  const uint64_t begin = written_ + pending_bytes_;
  std::string item = value_item(value);
  const uint64_t length = item.size();
  put_owned(std::move(item));
  return {begin, length};
}

void ItemFile::begin_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes) {
  TensorFrame frame = frame_tensor(dtype, sizes);
  item_begin_ = written_ + pending_bytes_;
  missing_bytes_ = frame.data_bytes;
  tail_ = std::move(frame.tail);
  put_owned(std::move(frame.head));
}

void ItemFile::append(format::ByteSpan bytes) {
  if (bytes.size() > missing_bytes_) {
    throw FileError("more bytes than the tensor has");
  }
  missing_bytes_ -= bytes.size();
  put(bytes);
}

ItemPlace ItemFile::end_tensor() {
  if (missing_bytes_ != 0) {
    throw FileError("fewer bytes than the tensor has");
  }
  put_owned(std::exchange(tail_, {}));
  return {item_begin_, written_ + pending_bytes_ - item_begin_};
}

void ItemFile::put_owned(std::string bytes) {
  owned_.push_back(std::move(bytes));
  put(format::as_bytes(owned_.back()));
}

// One write is one block: the bytes that were summed are still in the cache
// when the system copies them.
void ItemFile::put(format::ByteSpan bytes) {
  while (!bytes.empty()) {
    const uint64_t room =
        kBlockBytes - (written_ + pending_bytes_) % kBlockBytes;
    const auto part = bytes.first(std::min<uint64_t>(room, bytes.size()));
    bytes = bytes.subspan(part.size());
    parts_.push_back({const_cast<uint8_t*>(part.data()), part.size()});
    pending_bytes_ += part.size();
    if (part.size() == room) {
      write_block();
    }
  }
}

void ItemFile::write_block() {
  for (const iovec& part : parts_) {
    sums_.add({static_cast<const uint8_t*>(part.iov_base), part.iov_len});
  }
  write_all(file_, path_, written_, parts_);
  written_ += pending_bytes_;
  pending_bytes_ = 0;
  parts_.clear();
  while (owned_.size() > 1) { // the last one may be in the middle of put()
    owned_.pop_front();
  }
  if (written_ - unsynced_from_ >= kWriteBehind) {
    // Only a hint: if it fails, the sync at the end writes everything.
    ::sync_file_range(
        file_.get(),
        static_cast<off_t>(unsynced_from_),
        static_cast<off_t>(written_ - unsynced_from_),
        SYNC_FILE_RANGE_WRITE);
    unsynced_from_ = written_;
  }
}

void ItemFile::flush() {
  if (pending_bytes_ > 0) {
    write_block();
  }
}

FileSums ItemFile::finish() {
  flush();
  sync_file(file_, path_);
  file_.reset();
  return sums_.finish();
}

} // namespace tessera::checkpoint
