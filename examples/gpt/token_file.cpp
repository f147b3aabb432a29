#include "token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'T', 'E', 'S', 'S', 'T', 'O', 'K', '1'};

struct Header {
  char magic[8];
  uint32_t token_bytes;
  uint32_t vocabulary;
  uint64_t size;
};
static_assert(sizeof(Header) == 24);

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw std::runtime_error(
      "\"" + path.string() + "\": " + what +
      " Remove its folder to have it made again.");
}

std::shared_ptr<const std::byte> map_file(const fs::path& path, size_t size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    fail(path, std::string("cannot be opened: ") + std::strerror(errno) + ".");
  }
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  if (memory == MAP_FAILED) {
    fail(path, std::string("cannot be mapped: ") + std::strerror(errno) + ".");
  }
  ::madvise(memory, size, MADV_RANDOM);
  return {static_cast<const std::byte*>(memory), [memory, size](const void*) {
            ::munmap(memory, size);
          }};
}

template <class Token>
void write_as(std::ofstream& file, std::span<const int32_t> tokens) {
  const std::vector<Token> narrow(tokens.begin(), tokens.end());
  file.write(
      reinterpret_cast<const char*>(narrow.data()),
      static_cast<std::streamsize>(narrow.size() * sizeof(Token)));
}

} // namespace

TokenFile::TokenFile(const fs::path& path) {
  std::error_code error;
  const auto file_bytes = fs::file_size(path, error);
  if (error) {
    fail(path, "cannot be read: " + error.message() + ".");
  }
  if (file_bytes < sizeof(Header)) {
    fail(path, "is not a file of tokens: it is too short.");
  }
  mapping_ = map_file(path, file_bytes);
  Header header;
  std::memcpy(&header, mapping_.get(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      (header.token_bytes != 2 && header.token_bytes != 4)) {
    fail(path, "is not a file of tokens.");
  }
  const uint64_t room = (file_bytes - sizeof(header)) / header.token_bytes;
  if (header.size != room) {
    fail(
        path,
        "says it has " + std::to_string(header.size) + " tokens, but has " +
            std::to_string(room) + ".");
  }
  tokens_ = mapping_.get() + sizeof(header);
  token_bytes_ = header.token_bytes;
  size_ = static_cast<int64_t>(header.size);
  vocabulary_ = header.vocabulary;
}

void TokenFile::write(
    const fs::path& path,
    std::span<const int32_t> tokens,
    int64_t vocabulary) {
  const bool is_narrow = vocabulary <= 65536;
  Header header{
      .magic = {},
      .token_bytes = is_narrow ? 2U : 4U,
      .vocabulary = static_cast<uint32_t>(vocabulary),
      .size = tokens.size()};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));

  const fs::path beside = path.string() + ".partial";
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  if (is_narrow) {
    write_as<uint16_t>(file, tokens);
  } else {
    write_as<int32_t>(file, tokens);
  }
  file.close();
  if (!file) {
    std::error_code ignored;
    fs::remove(beside, ignored);
    throw std::runtime_error(
        "cannot write \"" + beside.string() + "\". Is the disk full?");
  }
  fs::rename(beside, path);
}

void TokenFile::read(int64_t first, std::span<int64_t> to) const {
  if (first < 0 || first + std::ssize(to) > size_) {
    throw std::out_of_range(
        "tokens " + std::to_string(first) + " and on, of " +
        std::to_string(size_));
  }
  const auto* from = tokens_ + first * token_bytes_;
  if (token_bytes_ == 2) {
    const auto* narrow = reinterpret_cast<const uint16_t*>(from);
    std::copy_n(narrow, to.size(), to.begin());
  } else {
    const auto* wide = reinterpret_cast<const uint32_t*>(from);
    std::copy_n(wide, to.size(), to.begin());
  }
  // The model would read beyond its embedding.
  for (const int64_t token : to) {
    if (token >= vocabulary_) {
      throw std::runtime_error(
          "a token " + std::to_string(token) + " among " +
          std::to_string(vocabulary_) + ": the file of tokens is damaged.");
    }
  }
}

} // namespace gpt
