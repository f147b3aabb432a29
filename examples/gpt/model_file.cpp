#include "model_file.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

namespace gpt {

std::string digest_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> block(1 << 20);
  uint64_t hash = 0xcbf29ce484222325U;
  uint64_t size = 0;
  // A step of FNV-1a for 8 bytes at a time; the shift brings the upper half of
  // the product down again.
  const auto add = [&](uint64_t word) {
    hash = (hash ^ word) * 0x100000001b3U;
    hash ^= hash >> 32U;
  };
  while (file.read(block.data(), std::ssize(block)) || file.gcount() > 0) {
    const auto count = static_cast<size_t>(file.gcount());
    size += count;
    for (size_t at = 0; at < count; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, block.data() + at, std::min(sizeof(word), count - at));
      add(word);
    }
  }
  if (size == 0 || file.bad()) {
    throw UsageError(
        "--model \"" + path.string() + "\" is not a file that can be read.");
  }
  add(size);
  std::array<char, 17> digits{};
  std::snprintf(
      digits.data(),
      digits.size(),
      "%016llx",
      static_cast<unsigned long long>(hash));
  return digits.data();
}

void check_model_file(Settings& settings) {
  auto& exported = settings.exported;
  if (exported.file.empty()) {
    return;
  }
  const auto found = digest_of(exported.file);
  if (!exported.digest.empty() && exported.digest != found) {
    throw UsageError(
        "the run in \"" + settings.run.string() +
        "\" was begun with another model than --model \"" + exported.file +
        "\" is now: its digest was " + exported.digest + " and is " + found +
        ". Give the file that the run began with, or choose another --run.");
  }
  exported.digest = found;
}

} // namespace gpt
