#include "comm/store/wire.h"

#include <cstring>

namespace tessera::comm::wire {
namespace {

/// Reads while there are bytes; afterwards everything reads as zero. Not a
/// ByteReader: a request that is cut is not an error, the rest is on its way.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T number() {
    T value{};
    if (const std::string_view bytes = take(sizeof value); !bytes.empty()) {
      std::memcpy(&value, bytes.data(), sizeof value);
    }
    return value;
  }

  std::string_view text(size_t limit) {
    const auto size = number<uint64_t>();
    if (size > limit) {
      throw BadRequest("a key or a value is too long");
    }
    return take(size);
  }

  /// Bytes from the beginning to the end of the last thing that was read.
  size_t needed() const {
    return end_;
  }
  bool is_short() const {
    return end_ > bytes_.size();
  }

 private:
  std::string_view take(size_t size) {
    if (is_short()) {
      return {};
    }
    const size_t begin = end_;
    end_ += size;
    if (end_ > kMaxRequestBytes) {
      throw BadRequest("the request is too long");
    }
    return is_short() ? std::string_view() : bytes_.substr(begin, size);
  }

  const std::string_view bytes_;
  size_t end_ = 0; // of what was read; beyond bytes_ if the bytes ran out
};

size_t number_of_keys(Cursor& cursor) {
  const auto count = cursor.number<uint64_t>();
  if (count > kMaxKeys) {
    throw BadRequest("there are too many keys");
  }
  return count;
}

void take_arguments(Cursor& cursor, Request& request) {
  const auto take_key = [&] {
    request.keys.push_back(cursor.text(kMaxKeyBytes));
  };
  const auto take_value = [&] {
    request.values.push_back(cursor.text(kMaxValueBytes));
  };
  switch (request.query) {
    case Query::kValidate:
    case Query::kPing:
      request.number = cursor.number<uint32_t>();
      return;
    case Query::kSet:
    case Query::kAppend:
    case Query::kQueuePush:
      take_key();
      take_value();
      return;
    case Query::kCompareSet:
      take_key();
      take_value();
      take_value();
      return;
    case Query::kGet:
    case Query::kDelete:
    case Query::kQueuePop:
    case Query::kQueueLength:
      take_key();
      return;
    case Query::kAdd:
    case Query::kBarrier:
      take_key();
      request.number = cursor.number<int64_t>();
      return;
    case Query::kCheck:
    case Query::kWait:
    case Query::kMultiGet:
      for (size_t left = number_of_keys(cursor); left > 0 && !cursor.is_short();
           --left) {
        take_key();
      }
      return;
    case Query::kMultiSet:
      for (size_t left = number_of_keys(cursor); left > 0 && !cursor.is_short();
           --left) {
        take_key();
        take_value();
      }
      return;
    case Query::kCount:
    case Query::kCancelWait:
    case Query::kListKeys:
      return;
  }
  throw BadRequest("this kind of request is not supported");
}

} // namespace

std::optional<Request> take_request(std::string_view& bytes, size_t& needed) {
  Cursor cursor(bytes);
  Request request{cursor.number<Query>(), {}, {}};
  if (!cursor.is_short()) {
    take_arguments(cursor, request);
  }
  needed = cursor.needed();
  if (cursor.is_short()) {
    return std::nullopt;
  }
  bytes.remove_prefix(needed);
  return request;
}

} // namespace tessera::comm::wire
