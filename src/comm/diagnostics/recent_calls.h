// The calls that a rank made last, to be compared with another rank's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/diagnostics/call.h"

namespace tessera::comm {

/// See [Note: long waits] in comm/group/long_wait.h.
class RecentCalls {
 public:
  void note(const Call& call);
  /// The ranks have compared this call themselves.
  void forget(const Call& call);

  /// For another rank's differing_from().
  std::vector<uint8_t> bytes() const;
  /// The number of the first call that this rank and the other one, whose
  /// bytes() these are, made differently.
  std::optional<uint64_t> differing_from(std::span<const uint8_t> theirs) const;

 private:
  static constexpr size_t kKept = 32;

  std::array<Call, kKept> calls_; // by number; without operation: none
};

/// The call of that number in what bytes() gave.
std::optional<Call> find_call(
    std::span<const uint8_t> bytes,
    uint64_t sequence);

} // namespace tessera::comm
