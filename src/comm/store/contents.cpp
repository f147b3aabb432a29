#include "comm/store/contents.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace tessera::comm {
namespace {

using wire::Message;
using wire::Query;

/// As c10d reads numbers, with spaces before and anything after them.
int64_t to_number(const std::string& text) {
  try {
    return std::stoll(text);
  } catch (const std::logic_error&) {
    throw wire::BadRequest("the value is not a number");
  }
}

/// About the bytes that an entry takes.
size_t cost(std::string_view key, std::string_view value = {}) {
  constexpr size_t kEntry = 96;
  return kEntry + key.size() + value.size();
}

} // namespace

StoreContents::StoreContents(size_t max_bytes, Reply reply)
    : max_bytes_(max_bytes), reply_(std::move(reply)) {}

void StoreContents::handle(ClientId client, const wire::Request& request) {
  const auto key = [&](size_t i = 0) { return std::string(request.keys[i]); };
  switch (request.query) {
    case Query::kValidate:
      return;
    case Query::kPing:
      reply_(client, Message().number(static_cast<uint32_t>(request.number)));
      return;
    case Query::kSet:
      set(key(), std::string(request.values[0]));
      return;
    case Query::kMultiSet:
      require_room(request); // all keys are set, or none
      for (size_t i = 0; i < request.keys.size(); ++i) {
        set(key(i), std::string(request.values[i]));
      }
      return;
    case Query::kAppend:
      append(key(), request.values[0]);
      return;
    case Query::kCompareSet:
      reply_(
          client,
          Message().text(
              compare_set(key(), request.values[0], request.values[1])));
      return;
    case Query::kAdd:
      reply_(client, Message().number(count(key(), request.number)));
      wake_all(key());
      return;
    case Query::kGet:
      reply_(client, Message().text(value_of(key())));
      return;
    case Query::kMultiGet: {
      Message all;
      for (size_t i = 0; i < request.keys.size(); ++i) {
        all.text(value_of(key(i)));
        if (all.bytes().size() > wire::kMaxUnsentBytes) {
          throw wire::BadRequest("the answer would be too long");
        }
      }
      reply_(client, all);
      return;
    }
    case Query::kDelete:
      reply_(client, Message().number(erase(key())));
      return;
    case Query::kCount:
      reply_(client, Message().number(static_cast<int64_t>(values_.size())));
      return;
    case Query::kListKeys: {
      Message all;
      all.number(static_cast<int64_t>(values_.size()));
      for (const auto& [name, value] : values_) {
        all.text(name);
      }
      reply_(client, all);
      return;
    }
    case Query::kCheck: {
      const bool all_there =
          std::all_of(request.keys.begin(), request.keys.end(), [&](auto name) {
            return is_there(std::string(name));
          });
      reply_(
          client,
          Message().number(
              all_there ? wire::Presence::kAllThere
                        : wire::Presence::kMissing));
      return;
    }
    case Query::kWait:
      wait(client, request.keys);
      return;
    case Query::kCancelWait:
      forget(client);
      reply_(client, Message().number(wire::WaitEnd::kCancelled));
      return;
    case Query::kBarrier:
      come_to_barrier(client, key(), request.number);
      return;
    case Query::kQueuePush:
      push(key(), request.values[0]);
      wake_one(key());
      return;
    case Query::kQueuePop:
      reply_(client, pop(key()));
      return;
    case Query::kQueueLength:
      reply_(client, Message().number(length_of_queue(key())));
      return;
  }
}

void StoreContents::forget(ClientId client) {
  if (awaited_.erase(client) == 0) {
    return;
  }
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    held_ -= std::erase(at->second, client) * cost(at->first);
    at = at->second.empty() ? waiting_.erase(at) : std::next(at);
  }
}

std::string_view StoreContents::value_of(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? std::string_view() : found->second;
}

int64_t StoreContents::length_of_queue(const std::string& key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0
                                : static_cast<int64_t>(found->second.size());
}

bool StoreContents::is_there(const std::string& key) const {
  return values_.contains(key) || length_of_queue(key) > 0;
}

void StoreContents::require_room(size_t bytes) const {
  if (held_ + bytes > max_bytes_) {
    throw StoreFull("the store is full");
  }
}

void StoreContents::require_room(const wire::Request& request) const {
  size_t bytes = 0;
  for (size_t i = 0; i < request.keys.size(); ++i) {
    bytes += cost(request.keys[i], request.values[i]);
  }
  require_room(bytes);
}

void StoreContents::put(const std::string& key, std::string value) {
  require_room(cost(key, value));
  erase(key);
  held_ += cost(key, value);
  values_.emplace(key, std::move(value));
}

int64_t StoreContents::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    return 0;
  }
  held_ -= cost(key, found->second);
  values_.erase(found);
  return 1;
}

void StoreContents::set(const std::string& key, std::string value) {
  put(key, std::move(value));
  wake_all(key);
}

void StoreContents::push(const std::string& key, std::string_view value) {
  require_room(cost(key, value));
  queues_[key].emplace_back(value);
  held_ += cost(key, value);
}

void StoreContents::append(const std::string& key, std::string_view more) {
  if (value_of(key).size() + more.size() > wire::kMaxValueBytes) {
    throw wire::BadRequest("the value gets too long");
  }
  put(key, std::string(value_of(key)).append(more));
  wake_all(key);
}

std::string StoreContents::compare_set(
    const std::string& key,
    std::string_view expected,
    std::string_view desired) {
  const auto found = values_.find(key);
  if (found == values_.end() ? expected.empty() : found->second == expected) {
    set(key, std::string(desired));
    return std::string(desired);
  }
  // For a missing key c10d answers with the expected value.
  return found == values_.end() ? std::string(expected) : found->second;
}

/// The sum afterwards.
int64_t StoreContents::count(const std::string& key, int64_t amount) {
  const auto found = values_.find(key);
  const int64_t before = found == values_.end() ? 0 : to_number(found->second);
  int64_t sum = 0;
  if (__builtin_add_overflow(before, amount, &sum)) {
    throw wire::BadRequest("the sum is too large");
  }
  put(key, std::to_string(sum));
  return sum;
}

Message StoreContents::pop(const std::string& key) {
  Message reply;
  reply.number(length_of_queue(key));
  if (const auto found = queues_.find(key); found != queues_.end()) {
    reply.text(found->second.front());
    held_ -= cost(key, found->second.front());
    found->second.pop_front();
    if (found->second.empty()) {
      queues_.erase(found);
    }
  }
  return reply;
}

void StoreContents::come_to_barrier(
    ClientId client,
    const std::string& key,
    int64_t size) {
  if (count(key, 1) >= size) {
    wake_all(key);
    end_wait(client);
  } else {
    forget(client);
    await(client, key);
  }
}

void StoreContents::wait(
    ClientId client,
    const std::vector<std::string_view>& keys) {
  forget(client);
  for (const std::string_view view : keys) {
    const std::string key(view);
    if (!is_there(key)) {
      await(client, key);
    }
  }
  if (!awaited_.contains(client)) {
    end_wait(client);
  }
}

void StoreContents::await(ClientId client, const std::string& key) {
  require_room(cost(key));
  held_ += cost(key);
  waiting_[key].push_back(client);
  ++awaited_[client];
}

void StoreContents::end_wait(ClientId client) {
  reply_(client, Message().number(wire::WaitEnd::kDone));
}

void StoreContents::wake_all(const std::string& key) {
  if (const auto found = waiting_.find(key); found != waiting_.end()) {
    const std::vector<ClientId> clients = std::move(found->second);
    held_ -= clients.size() * cost(key);
    waiting_.erase(found);
    for (const ClientId client : clients) {
      count_down(client);
    }
  }
}

/// A pushed value is for one client alone.
void StoreContents::wake_one(const std::string& key) {
  bool is_awake = false;
  while (!is_awake) {
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) {
      return;
    }
    const ClientId client = found->second.front();
    found->second.erase(found->second.begin());
    held_ -= cost(key);
    if (found->second.empty()) {
      waiting_.erase(found);
    }
    is_awake = count_down(client);
  }
}

/// Notes that one of the keys that the client waits for came. True if it was
/// the last.
bool StoreContents::count_down(ClientId client) {
  const auto found = awaited_.find(client);
  if (found == awaited_.end() || --found->second > 0) {
    return false;
  }
  awaited_.erase(found);
  end_wait(client);
  return true;
}

} // namespace tessera::comm
