#include <tessera/data/token_file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/unique_fd.h"
#include "data/token_format.h"

namespace tessera::data {

namespace fs = std::filesystem;

struct TokenFile::OpenFile {
  fs::path path;
  UniqueFd fd;
};

namespace {

constexpr size_t kChunkBytes = 16384;

[[noreturn]] void refuse_file(const fs::path& path, const std::string& what) {
  raise<DataError>({.call = "TokenFile", .path = path.native()}, what);
}

std::string text_of_errno(int error) {
  return std::generic_category().message(error);
}

/// Reads all `bytes` at `offset`; the number that there are, if fewer.
size_t read_at(
    const fs::path& path,
    int fd,
    void* to,
    size_t bytes,
    uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::pread(
        fd,
        static_cast<char*>(to) + done,
        bytes - done,
        static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      refuse_file(
          path,
          fmt::format(
              "byte {} cannot be read: {}. Check the disk or the network file system.",
              offset + done,
              text_of_errno(errno)));
    }
    if (got == 0) {
      break;
    }
    done += static_cast<size_t>(got);
  }
  return done;
}

/// Throws unless the header describes a file of `file_bytes`.
void check_header(
    const fs::path& path,
    const TokenHeader& header,
    uint64_t file_bytes) {
  if (std::memcmp(header.magic, kTokenMagic, sizeof kTokenMagic - 1) != 0) {
    refuse_file(
        path,
        "is not a token file: the first bytes are not \"TESSTOK\". Write it with TokenFileWriter.");
  }
  if (header.magic[7] != kTokenMagic[7]) {
    refuse_file(
        path,
        fmt::format(
            "is a token file of version {:?}, and only version '1' is known. Read it with a newer Tessera.",
            header.magic[7]));
  }
  if (header.token_bytes != 2 && header.token_bytes != 4) {
    refuse_file(
        path,
        fmt::format(
            "tokens of {} bytes; only 2 and 4 are possible. The file is damaged: write it again.",
            header.token_bytes));
  }
  if (header.vocabulary < 1 || header.vocabulary > kMaxVocabulary) {
    refuse_file(
        path,
        fmt::format(
            "a vocabulary of {}; 1 to {} are possible. The file is damaged: write it again.",
            header.vocabulary,
            kMaxVocabulary));
  }
  const uint64_t token_bytes = file_bytes - sizeof(TokenHeader);
  if (token_bytes % header.token_bytes != 0 ||
      header.size != token_bytes / header.token_bytes) {
    refuse_file(
        path,
        fmt::format(
            "promises {} tokens of {} bytes, and has {} bytes for them. The file was cut or damaged: copy or write it again.",
            header.size,
            header.token_bytes,
            token_bytes));
  }
}

template <class Token>
void widen(const char* from, std::span<int64_t> to) {
  for (int64_t& token : to) {
    Token narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    token = narrow;
    from += sizeof narrow;
  }
}

} // namespace

TokenFile::TokenFile(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) {
    refuse_file(
        path,
        fmt::format(
            "cannot be opened: {}. Check the path and its permissions.",
            text_of_errno(errno)));
  }
  if (!S_ISREG(about.st_mode)) {
    refuse_file(path, "is not a file. Give the path of a token file.");
  }
  TokenHeader header{};
  const size_t got = read_at(path, fd.get(), &header, sizeof header, 0);
  if (got < sizeof header) {
    refuse_file(
        path,
        fmt::format(
            "is not a token file: it has {} bytes, and the header alone has {}. Copy or write it again.",
            got,
            sizeof header));
  }
  check_header(path, header, static_cast<uint64_t>(about.st_size));
  size_ = static_cast<int64_t>(header.size);
  vocabulary_ = header.vocabulary;
  token_bytes_ = header.token_bytes;
  file_ = std::make_shared<OpenFile>(OpenFile{path, std::move(fd)});
}

const fs::path& TokenFile::path() const {
  return file_->path;
}

void TokenFile::read(int64_t first, std::span<int64_t> to) const {
  const auto count = static_cast<int64_t>(to.size());
  if (first < 0 || count > size_ || first > size_ - count) {
    raise<c10::IndexError>(
        {.call = "TokenFile::read", .path = path().native()},
        fmt::format("{} tokens from token {} on, of {}.", count, first, size_));
  }
  const auto width = static_cast<size_t>(token_bytes_);
  std::array<char, kChunkBytes> chunk;
  while (!to.empty()) {
    const auto now = to.first(std::min(to.size(), chunk.size() / width));
    const uint64_t offset =
        sizeof(TokenHeader) + static_cast<uint64_t>(first) * width;
    const size_t bytes = now.size() * width;
    if (read_at(path(), file_->fd.get(), chunk.data(), bytes, offset) < bytes) {
      refuse_file(
          path(),
          fmt::format(
              "ends before token {} of {}: it was cut after it was opened. Write it again; a file that is in use must be replaced and not overwritten.",
              first + static_cast<int64_t>(now.size()) - 1,
              size_));
    }
    if (width == 2) {
      widen<uint16_t>(chunk.data(), now);
    } else {
      widen<uint32_t>(chunk.data(), now);
    }
    const auto bad = std::find_if(now.begin(), now.end(), [&](int64_t token) {
      return token >= vocabulary_;
    });
    if (bad != now.end()) {
      refuse_file(
          path(),
          fmt::format(
              "token {} is {}, and the vocabulary has {}. The file is damaged: copy or write it again.",
              first + (bad - now.begin()),
              *bad,
              vocabulary_));
    }
    first += static_cast<int64_t>(now.size());
    to = to.subspan(now.size());
  }
}

} // namespace tessera::data
