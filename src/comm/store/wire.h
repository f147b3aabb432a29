// What goes over the wire between a key-value store and its clients. The
// protocol is that of c10d's TCPStore, so that Python ranks meet in our store
// and our ranks in theirs: a request is one byte for its kind, then its
// arguments; numbers are as the processor has them; a text is its length
// (uint64) and its bytes. A connection begins with Validate, which is not
// answered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_stream.h"

namespace tessera::comm::wire {

inline constexpr uint32_t kMagic = 0x3C85F7CE;
/// What c10d's clients put before each key.
inline constexpr std::string_view kKeyPrefix = "/";

// A request beyond these limits is refused. The first three are c10d's too.
inline constexpr size_t kMaxKeys = 128 * 1024;
inline constexpr size_t kMaxKeyBytes = 8 * 1024;
inline constexpr size_t kMaxValueBytes = 8 * 1024 * 1024;
inline constexpr size_t kMaxRequestBytes = 64 * 1024 * 1024;
/// A client that leaves more than this unread is cut off, so no answer is
/// longer.
inline constexpr size_t kMaxUnsentBytes = 64 * 1024 * 1024;

// Ours alone, in place of Validate where a secret is set. See [Note: the
// secret].
inline constexpr uint8_t kHello = 0xA0; // a Nonce; answer: Nonce and Digest
inline constexpr uint8_t kProof = 0xA1; // a Digest; no answer

enum class Query : uint8_t {
  kValidate, // uint32 magic; no answer
  kSet, // key, value; no answer
  kCompareSet, // key, expected, desired; what is there afterwards
  kGet, // key; its value, empty if there is none
  kAdd, // key, int64; the sum, int64
  kCheck, // keys; Presence
  kWait, // keys; WaitEnd once all are there
  kCount, // number of keys, int64
  kDelete, // key; how many there were, int64
  kAppend, // key, value; no answer
  kMultiGet, // keys; the value of each
  kMultiSet, // number, then key and value of each; no answer
  kCancelWait, // WaitEnd::kCancelled
  kPing, // uint32; the same
  kQueuePush, // key, value; no answer
  kQueuePop, // key; how many there were, int64, and the first if any
  kQueueLength, // key; int64
  kListKeys, // their number, int64, and each
  kBarrier, // key, int64; WaitEnd once so many have come
};

enum class Presence : uint8_t { kAllThere, kMissing };
enum class WaitEnd : uint8_t { kDone, kCancelled };

/// Views point into the bytes that were read.
struct Request {
  Query query;
  std::vector<std::string_view> keys;
  std::vector<std::string_view> values;
  int64_t number = 0;
};

struct BadRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Removes the request at the beginning of `bytes` and returns it. Returns
/// nothing if the request is not complete yet: call again once there are
/// `needed` bytes. Throws BadRequest if the bytes are not a request.
std::optional<Request> take_request(std::string_view& bytes, size_t& needed);

class Message {
 public:
  Message() = default;
  explicit Message(Query query) {
    number(query);
  }

  template <class T>
  Message& number(T value) {
    append_number(bytes_, value);
    return *this;
  }
  Message& text(std::string_view text) {
    append_text(bytes_, text);
    return *this;
  }
  Message& key(std::string_view key) {
    number<uint64_t>(kKeyPrefix.size() + key.size());
    bytes_ += kKeyPrefix;
    bytes_ += key;
    return *this;
  }

  const std::string& bytes() const {
    return bytes_;
  }

 private:
  std::string bytes_;
};

} // namespace tessera::comm::wire
