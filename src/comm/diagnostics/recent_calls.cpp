#include "comm/diagnostics/recent_calls.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace tessera::comm {
namespace {

std::vector<Call> calls_in(std::span<const uint8_t> bytes) {
  std::vector<Call> calls(bytes.size() / sizeof(Call));
  std::memcpy(calls.data(), bytes.data(), calls.size() * sizeof(Call));
  return calls;
}

bool are_alike(const Call& a, const Call& b) {
  return a.bytes == b.bytes && std::string_view(a.operation) == b.operation &&
      std::string_view(a.detail) == b.detail;
}

} // namespace

void RecentCalls::note(const Call& call) {
  calls_[call.sequence % kKept] = call;
}

void RecentCalls::forget(const Call& call) {
  calls_[call.sequence % kKept] = {};
}

std::vector<uint8_t> RecentCalls::bytes() const {
  std::vector<uint8_t> bytes;
  for (const Call& call : calls_) {
    if (call.operation[0] != '\0') {
      const auto* begin = reinterpret_cast<const uint8_t*>(&call);
      bytes.insert(bytes.end(), begin, begin + sizeof call);
    }
  }
  return bytes;
}

std::optional<uint64_t> RecentCalls::differing_from(
    std::span<const uint8_t> theirs) const {
  std::optional<uint64_t> first;
  for (const Call& call : calls_in(theirs)) {
    const Call& mine = calls_[call.sequence % kKept];
    const bool differs = mine.operation[0] != '\0' &&
        mine.sequence == call.sequence && !are_alike(mine, call);
    if (differs) {
      first = std::min(first.value_or(call.sequence), call.sequence);
    }
  }
  return first;
}

std::optional<Call> find_call(
    std::span<const uint8_t> bytes,
    uint64_t sequence) {
  for (const Call& call : calls_in(bytes)) {
    if (call.sequence == sequence) {
      return call;
    }
  }
  return std::nullopt;
}

} // namespace tessera::comm
