#include <tessera/data/token_file.h>

#include <fcntl.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "data/token_format.h"

namespace tessera::data {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail_to_write(const fs::path& path, const char* what) {
  raise<DataError>(
      {.call = "TokenFileWriter", .path = path.native()},
      fmt::format(
          "{}: {}. Check the folder, its permissions and the free space.",
          what,
          std::generic_category().message(errno)));
}

void write_at(
    const fs::path& path,
    int fd,
    std::span<const char> bytes,
    off_t at) {
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(fd, bytes.data(), bytes.size(), at);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done < 0) {
      fail_to_write(path, "cannot be written");
    }
    bytes = bytes.subspan(static_cast<size_t>(done));
    at += done;
  }
}

} // namespace

struct TokenFileWriter::Impl {
  fs::path path;
  fs::path partial;
  UniqueFd fd;
  TokenHeader header{};
  std::vector<char> buffer; // not written yet
  off_t end = sizeof(TokenHeader); // of what is written
  bool has_failed = false; // what was appended then is in doubt

  void flush() {
    has_failed = true; // unless this returns
    write_at(partial, fd.get(), buffer, end);
    has_failed = false;
    end += static_cast<off_t>(buffer.size());
    buffer.clear();
  }

  void check_open(const char* call) const {
    if (!fd || has_failed) {
      raise<c10::ValueError>(
          {.call = call, .path = path.native()},
          fd ? "an earlier write failed, so this file cannot be completed. Write it anew."
             : "the file was closed already.");
    }
  }

  template <class Token>
  void append(std::span<const Token> tokens) {
    check_open("TokenFileWriter::append");
    const auto bad =
        std::find_if(tokens.begin(), tokens.end(), [this](Token token) {
          return token < 0 || static_cast<int64_t>(token) >= header.vocabulary;
        });
    if (bad != tokens.end()) {
      raise<c10::ValueError>(
          {.call = "TokenFileWriter::append", .path = path.native()},
          fmt::format(
              "a token {} in a vocabulary of {}: tokens are 0 to {}.",
              *bad,
              header.vocabulary,
              header.vocabulary - 1));
    }
    for (const Token token : tokens) {
      const auto wide = static_cast<uint32_t>(token);
      const auto* bytes = reinterpret_cast<const char*>(&wide);
      buffer.insert(buffer.end(), bytes, bytes + header.token_bytes);
      if (buffer.size() >= kBufferBytes) {
        flush();
      }
    }
    header.size += tokens.size();
  }
};

TokenFileWriter::TokenFileWriter(const fs::path& path, int64_t vocabulary) {
  if (vocabulary < 1 || vocabulary > kMaxVocabulary) {
    raise<c10::ValueError>(
        {.call = "TokenFileWriter", .path = path.native()},
        fmt::format(
            "a vocabulary of {}: 1 to {} are possible.",
            vocabulary,
            kMaxVocabulary));
  }
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->partial = path.native() + ".partial";
  std::memcpy(impl->header.magic, kTokenMagic, sizeof kTokenMagic);
  impl->header.token_bytes = vocabulary <= 65536 ? 2 : 4;
  impl->header.vocabulary = static_cast<uint32_t>(vocabulary);
  impl->fd = UniqueFd(::open(
      impl->partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!impl->fd) {
    fail_to_write(impl->partial, "cannot be made");
  }
  impl_ = std::move(impl);
}

TokenFileWriter::~TokenFileWriter() {
  if (impl_->fd) {
    std::error_code ignored; // a partial file is no token file to anybody
    fs::remove(impl_->partial, ignored);
  }
}

void TokenFileWriter::append(std::span<const int32_t> tokens) {
  impl_->append(tokens);
}

void TokenFileWriter::append(std::span<const int64_t> tokens) {
  impl_->append(tokens);
}

int64_t TokenFileWriter::size() const {
  return static_cast<int64_t>(impl_->header.size);
}

void TokenFileWriter::close() {
  if (!impl_->fd) {
    return;
  }
  impl_->check_open("TokenFileWriter::close");
  impl_->flush();
  const auto* header = reinterpret_cast<const char*>(&impl_->header);
  write_at(impl_->partial, impl_->fd.get(), {header, sizeof impl_->header}, 0);
  if (::fsync(impl_->fd.get()) != 0) {
    fail_to_write(impl_->partial, "cannot be synced to the disk");
  }
  if (::rename(impl_->partial.c_str(), impl_->path.c_str()) != 0) {
    fail_to_write(impl_->path, "cannot be given its name");
  }
  impl_->fd.reset();
}

} // namespace tessera::data
