// How libFuzzer changes the inputs of fuzz_exported.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/exported_mutator.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using tessera::format::as_text;
using tessera::format::ExportedMutator;

std::string change_bytes(std::string bytes, size_t max_size) {
  constexpr size_t kMostAdded = 64;
  const size_t size = bytes.size();
  bytes.resize(std::max(size, std::min(size + kMostAdded, max_size)));
  bytes.resize(LLVMFuzzerMutate(
      reinterpret_cast<uint8_t*>(bytes.data()), size, bytes.size()));
  return bytes;
}

size_t put(const std::string& bytes, uint8_t* to, size_t max_size) {
  return bytes.copy(reinterpret_cast<char*>(to), max_size);
}

} // namespace

extern "C" size_t LLVMFuzzerCustomMutator(
    uint8_t* data,
    size_t size,
    size_t max_size,
    unsigned seed) {
  ExportedMutator mutator(seed, change_bytes);
  return put(mutator.change(as_text({data, size}), max_size), data, max_size);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(
    const uint8_t* data,
    size_t size,
    const uint8_t* other,
    size_t other_size,
    uint8_t* out,
    size_t max_size,
    unsigned seed) {
  ExportedMutator mutator(seed, change_bytes);
  const auto crossed = mutator.cross(
      as_text({data, size}), as_text({other, other_size}), max_size);
  return put(crossed, out, max_size);
}
