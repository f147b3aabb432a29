#pragma once

#include <tessera/api.h>

#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// Where an error happened. Empty fields are left out of the message.
struct ErrorSite {
  /// The public call, as the user wrote it: "fully_shard".
  std::string_view call = {};
  int rank = -1; // of the world
  int world_size = -1; // with rank: "rank 2/8"
  std::string_view group; // its name
  std::string_view unit; // of a sharded model
  std::string_view parameter; // below the unit
  std::string_view path; // of a file or folder
};

/// Builds the text that every Tessera error shows:
/// `[call] rank 2/8, unit "layers.7", parameter "wq": what`. `what` says what
/// was expected and what was found, and ends with what to do.
TESSERA_API std::string format_error(
    const ErrorSite& site,
    std::string_view what);

/// Throws `E` (c10::Error or one of its kin) with the formatted text and no
/// stack trace, so that `what()` is the message alone.
template <class E = c10::Error>
[[noreturn]] void raise(const ErrorSite& site, std::string_view what) {
  throw E(format_error(site, what), /*backtrace=*/nullptr);
}

/// A collective or a rendezvous waited longer than its timeout. Its group is
/// unusable afterwards: shut down and initialize again.
class TESSERA_API TimeoutError : public c10::DistError {
  using DistError::DistError;
};

/// A peer process died or left the group. The group is unusable afterwards.
class TESSERA_API PeerLostError : public c10::DistError {
  using DistError::DistError;
};

/// Ranks passed different things where all must pass the same. Thrown on every
/// rank of the group, before any data moved; the group stays usable.
class TESSERA_API DisagreementError : public c10::DistError {
  using DistError::DistError;
};

namespace detail {
[[noreturn]] TESSERA_API void internal_assert_fail(
    const char* condition,
    const char* file,
    int line,
    const std::string& what);
} // namespace detail

} // namespace tessera

/// Guards an invariant of Tessera itself. Never use it to check what a user
/// passed.
#define TESSERA_INTERNAL_ASSERT(condition, what)   \
  do {                                             \
    if (!(condition)) [[unlikely]] {               \
      ::tessera::detail::internal_assert_fail(     \
          #condition, __FILE__, __LINE__, (what)); \
    }                                              \
  } while (false)
