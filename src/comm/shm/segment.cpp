#include "comm/shm/segment.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/unique_fd.h"

namespace tessera::comm::shm {
namespace {

[[noreturn]] void throw_errno(const std::string& step) {
  throw std::system_error(errno, std::generic_category(), step);
}

std::byte* map(int fd, size_t bytes) {
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    throw_errno("mmap of " + std::to_string(bytes) + " shared bytes");
  }
  return static_cast<std::byte*>(address);
}

constexpr const char* kName = "tessera";
/// What the kernel calls a memfd of this name.
constexpr std::string_view kTarget = "/memfd:tessera (deleted)";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_refusal(const std::string& what) {
  errno = EACCES;
  throw_errno(what);
}

std::string own_path(int fd) {
  return "/proc/self/fd/" + std::to_string(fd);
}

struct stat status_of(int fd) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    throw_errno("fstat of a shared segment");
  }
  return status;
}

bool is_memfd_of_ours(int fd) {
  char target[64];
  const ssize_t length = readlink(own_path(fd).c_str(), target, sizeof target);
  struct statfs system {};
  return length > 0 &&
      std::string_view(target, static_cast<size_t>(length)) == kTarget &&
      fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
}

/// Throws unless the file is the segment that a peer of this user announced.
void require_segment(
    int fd,
    const SegmentLocator& locator,
    const std::string& path) {
  const struct stat status = status_of(fd);
  if (status.st_uid != geteuid()) {
    throw_refusal(
        path + " belongs to user " + std::to_string(status.st_uid) +
        ", and this process to user " + std::to_string(geteuid()));
  }
  if (!S_ISREG(status.st_mode) || !is_memfd_of_ours(fd)) {
    throw_refusal(path + " is not a memfd of Tessera");
  }
  if (status.st_ino != locator.inode ||
      static_cast<uint64_t>(status.st_size) != locator.bytes) {
    errno = ESTALE;
    throw_errno(path + " is not the segment that the peer announced");
  }
}

} // namespace

std::string SegmentLocator::to_string() const {
  char text[96];
  std::snprintf(
      text,
      sizeof text,
      "%" PRId32 " %" PRId32 " %" PRIu64 " %" PRIu64,
      pid,
      fd,
      bytes,
      inode);
  return text;
}

SegmentLocator SegmentLocator::parse(const std::string& text) {
  SegmentLocator locator;
  int end = 0;
  const int fields = std::sscanf(
      text.c_str(),
      "%" SCNd32 " %" SCNd32 " %" SCNu64 " %" SCNu64 "%n",
      &locator.pid,
      &locator.fd,
      &locator.bytes,
      &locator.inode,
      &end);
  if (fields != 4 || static_cast<size_t>(end) != text.size()) {
    throw std::invalid_argument("not a segment locator: \"" + text + "\"");
  }
  return locator;
}

Segment Segment::create(size_t bytes) {
  Segment segment;
  segment.fd_ = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment.fd_ < 0) {
    throw_errno("memfd_create");
  }
  if (ftruncate(segment.fd_, static_cast<off_t>(bytes)) != 0) {
    throw_errno("ftruncate to " + std::to_string(bytes) + " bytes");
  }
  if (fcntl(segment.fd_, F_ADD_SEALS, kSeals) != 0) {
    throw_errno("sealing of a memfd");
  }
  segment.data_ = map(segment.fd_, bytes);
  segment.bytes_ = bytes;
  return segment;
}

Segment Segment::open(const SegmentLocator& locator) {
  const std::string path = "/proc/" + std::to_string(locator.pid) + "/fd/" +
      std::to_string(locator.fd);
  // Opened for its name alone: a file of another kind is not touched.
  const UniqueFd found(::open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!found) {
    throw_errno("open of a peer's segment at " + path);
  }
  require_segment(found.get(), locator, path);
  Segment segment;
  segment.fd_ = ::open(own_path(found.get()).c_str(), O_RDWR | O_CLOEXEC);
  if (segment.fd_ < 0) {
    throw_errno("open of a peer's segment at " + path);
  }
  if ((fcntl(segment.fd_, F_GET_SEALS) & kSeals) != kSeals) {
    throw_refusal(path + " is not sealed as segments are");
  }
  segment.data_ = map(segment.fd_, locator.bytes);
  segment.bytes_ = locator.bytes;
  segment.close_descriptor();
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

Segment::~Segment() {
  close_descriptor();
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

SegmentLocator Segment::locator() const {
  return {
      .pid = getpid(),
      .fd = fd_,
      .bytes = bytes_,
      .inode = status_of(fd_).st_ino};
}

void Segment::close_descriptor() {
  if (fd_ >= 0) {
    close(std::exchange(fd_, -1));
  }
}

} // namespace tessera::comm::shm
