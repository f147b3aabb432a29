#include "comm/store/client.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "comm/store/stream.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using wire::Message;
using wire::Query;

/// How long an answer may take that the store can give at once, at least.
constexpr Milliseconds kLeast{5000};

std::string_view text_of(const std::vector<uint8_t>& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

Message about(Query query, const std::vector<std::string>& keys) {
  Message message(query);
  message.number<uint64_t>(keys.size());
  for (const std::string& key : keys) {
    message.key(key);
  }
  return message;
}

/// Cancels a wait whose time is over. False if the keys came after all.
bool call_off(StoreStream& stream) {
  stream.set_deadline(after(kLeast));
  stream.send(Message(Query::kCancelWait));
  if (stream.number<wire::WaitEnd>() == wire::WaitEnd::kCancelled) {
    return true;
  }
  stream.number<wire::WaitEnd>(); // the answer to the cancellation
  return false;
}

/// Throws DistStoreError if the keys are not set in time.
void wait_on(
    StoreStream& stream,
    const std::vector<std::string>& keys,
    Milliseconds timeout) {
  try {
    stream.set_deadline(after(timeout));
    stream.send(about(Query::kWait, keys));
    stream.number<wire::WaitEnd>();
  } catch (const StreamSilent&) {
    if (call_off(stream)) {
      raise<c10::DistStoreError>(
          {.call = "store"},
          fmt::format(
              "nobody set {} within {:.1f} s.",
              fmt::join(keys, ", "),
              std::chrono::duration<double>(timeout).count()));
    }
  }
}

} // namespace

StoreClient::StoreClient(
    UniqueFd socket,
    StoreEndpoint endpoint,
    Milliseconds timeout,
    std::shared_ptr<StoreServer> server)
    : Store(timeout),
      endpoint_(std::move(endpoint)),
      server_(std::move(server)),
      socket_(std::move(socket)) {}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  StorePtr store = connect_store(endpoint_, std::max(timeout_, kLeast));
  store->setTimeout(timeout_);
  return store;
}

Milliseconds StoreClient::time_for_answer() const {
  return timeout_ == kNoTimeout ? kNoTimeout : std::max(timeout_, kLeast);
}

/// `function` gets the stream, with the time that one answer may take.
template <class Function>
auto StoreClient::call(Function&& function) {
  const MutexLock lock(mutex_);
  std::string problem = "the connection to it failed before";
  try {
    if (socket_) {
      StoreStream stream(socket_.get(), after(time_for_answer()));
      return function(stream);
    }
  } catch (const StreamClosed& error) {
    problem = error.what();
  } catch (const StreamSilent&) {
    problem = "it does not answer";
  } catch (const c10::DistStoreError&) { // the stream is in order
    throw;
  } catch (...) {
    socket_.reset();
    throw;
  }
  socket_.reset();
  raise<c10::DistNetworkError>(
      {.call = "store"},
      fmt::format(
          "the store on {} is lost: {}. Rank 0 or the launcher hosts it: see whether that ended, is suspended, or its host cannot be reached.",
          endpoint_.to_string(),
          problem));
}

void StoreClient::set(
    const std::string& key,
    const std::vector<uint8_t>& value) {
  call([&](StoreStream& stream) {
    stream.send(Message(Query::kSet).key(key).text(text_of(value)));
  });
}

std::vector<uint8_t> StoreClient::compareSet(
    const std::string& key,
    const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return call([&](StoreStream& stream) {
    stream.send(Message(Query::kCompareSet)
                    .key(key)
                    .text(text_of(expected))
                    .text(text_of(desired)));
    return stream.bytes();
  });
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  return call([&](StoreStream& stream) {
    wait_on(stream, {key}, timeout_);
    stream.set_deadline(after(time_for_answer()));
    stream.send(Message(Query::kGet).key(key));
    return stream.bytes();
  });
}

int64_t StoreClient::add(const std::string& key, int64_t amount) {
  return call([&](StoreStream& stream) {
    stream.send(Message(Query::kAdd).key(key).number(amount));
    return stream.number<int64_t>();
  });
}

bool StoreClient::deleteKey(const std::string& key) {
  return call([&](StoreStream& stream) {
    stream.send(Message(Query::kDelete).key(key));
    return stream.number<int64_t>() == 1;
  });
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  return call([&](StoreStream& stream) {
    stream.send(about(Query::kCheck, keys));
    return stream.number<wire::Presence>() == wire::Presence::kAllThere;
  });
}

int64_t StoreClient::getNumKeys() {
  return call([](StoreStream& stream) {
    stream.send(Message(Query::kCount));
    return stream.number<int64_t>();
  });
}

void StoreClient::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void StoreClient::wait(
    const std::vector<std::string>& keys,
    const Milliseconds& timeout) {
  call([&](StoreStream& stream) { wait_on(stream, keys, timeout); });
}

void StoreClient::append(
    const std::string& key,
    const std::vector<uint8_t>& value) {
  call([&](StoreStream& stream) {
    stream.send(Message(Query::kAppend).key(key).text(text_of(value)));
  });
}

std::vector<std::vector<uint8_t>> StoreClient::multiGet(
    const std::vector<std::string>& keys) {
  return call([&](StoreStream& stream) {
    wait_on(stream, keys, timeout_);
    stream.set_deadline(after(time_for_answer()));
    stream.send(about(Query::kMultiGet, keys));
    std::vector<std::vector<uint8_t>> values;
    for (size_t i = 0; i < keys.size(); ++i) {
      values.push_back(stream.bytes());
    }
    return values;
  });
}

void StoreClient::multiSet(
    const std::vector<std::string>& keys,
    const std::vector<std::vector<uint8_t>>& values) {
  TESSERA_INTERNAL_ASSERT(
      keys.size() == values.size(), "as many keys as values");
  call([&](StoreStream& stream) {
    Message message(Query::kMultiSet);
    message.number<uint64_t>(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      message.key(keys[i]).text(text_of(values[i]));
    }
    stream.send(message);
  });
}

} // namespace tessera::comm
