#include "comm/store_wire.h"

#include <cstring>

namespace tessera::comm::wire {
namespace {

/// Reads on as long as there is enough; afterwards everything reads as zero.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : rest_(bytes) {}

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
      throw BadRequest("a text that is too long");
    }
    return take(size);
  }

  bool is_short() const {
    return is_short_;
  }
  std::string_view rest() const {
    return rest_;
  }

 private:
  std::string_view take(size_t size) {
    if (is_short_ || size > rest_.size()) {
      is_short_ = true;
      return {};
    }
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  bool is_short_ = false;
};

size_t number_of_keys(Cursor& cursor) {
  const auto count = cursor.number<uint64_t>();
  if (count > kMaxKeys) {
    throw BadRequest("too many keys");
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
  throw BadRequest("an unknown kind of request");
}

} // namespace

std::optional<Request> take_request(std::string_view& bytes) {
  Cursor cursor(bytes);
  Request request{cursor.number<Query>(), {}, {}};
  if (!cursor.is_short()) {
    take_arguments(cursor, request);
  }
  if (cursor.is_short()) {
    return std::nullopt;
  }
  bytes = cursor.rest();
  return request;
}

} // namespace tessera::comm::wire
