#include "comm/store/client.h"

#include <tessera/error.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "comm/store/peer_owner.h"
#include "comm/store/secret.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using wire::Message;
using wire::Query;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// How long one address gets to accept a connection, at most.
constexpr Milliseconds kConnectPatience{1000};
/// How long a store gets to answer the greeting, at least.
constexpr Milliseconds kGreeting{500};
/// How long an answer may take that the store can give at once, at least.
constexpr Milliseconds kLeast{5000};

struct StreamClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct StreamSilent : std::exception {};

Deadline after(Milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? Deadline::max()
                                            : Clock::now() + timeout;
}

/// 0 once `events` happened, ETIMEDOUT at the deadline.
int wait_for(int fd, short events, Deadline deadline) {
  constexpr Milliseconds kLongest = std::chrono::hours(1);
  for (;;) {
    const auto left = deadline - Clock::now();
    const auto turn = std::clamp<Clock::duration>(left, {}, kLongest);
    pollfd waited{fd, events, 0};
    const int count = poll(
        &waited,
        1,
        static_cast<int>(std::chrono::ceil<Milliseconds>(turn).count()));
    if (count > 0) {
      return 0;
    }
    if (count < 0 && errno != EINTR) {
      return errno;
    }
    if (Clock::now() >= deadline) {
      return ETIMEDOUT;
    }
  }
}

/// Sends and receives on a socket that does not block, until a deadline.
class Stream {
 public:
  Stream(int fd, Deadline deadline) : fd_(fd), deadline_(deadline) {}

  void set_deadline(Deadline deadline) {
    deadline_ = deadline;
  }

  /// Throws DistStoreError, with nothing sent, if no store would take
  /// `message`.
  void send(const Message& message) {
    check(message);
    send_bytes(message.bytes());
  }

  void send_bytes(std::string_view rest) {
    while (!rest.empty()) {
      const ssize_t count = ::send(fd_, rest.data(), rest.size(), MSG_NOSIGNAL);
      if (count >= 0) {
        rest.remove_prefix(static_cast<size_t>(count));
      } else {
        wait_or_throw(POLLOUT);
      }
    }
  }

  template <class T>
  T number() {
    T value{};
    receive(&value, sizeof value);
    return value;
  }

  template <class Array>
  Array array() {
    Array result;
    receive(result.data(), result.size());
    return result;
  }

  std::vector<uint8_t> bytes() {
    const auto size = number<uint64_t>();
    if (size > wire::kMaxRequestBytes) {
      throw StreamClosed("it sent something that is not an answer");
    }
    std::vector<uint8_t> result(size);
    receive(result.data(), result.size());
    return result;
  }

 private:
  static void check(const Message& message) {
    std::string_view bytes = message.bytes();
    size_t needed = 0;
    try {
      wire::take_request(bytes, needed);
    } catch (const wire::BadRequest& error) {
      raise<c10::DistStoreError>(
          {.call = "store"},
          fmt::format(
              "the store does not take this request of {} bytes: {}. A key has {} bytes at most, a value {}. The store is for meeting: send data with a collective.",
              bytes.size(),
              error.what(),
              wire::kMaxKeyBytes,
              wire::kMaxValueBytes));
    }
  }

  void receive(void* into, size_t size) {
    auto* at = static_cast<char*>(into);
    while (size > 0) {
      const ssize_t count = recv(fd_, at, size, 0);
      if (count > 0) {
        at += count;
        size -= static_cast<size_t>(count);
      } else if (count == 0) {
        throw StreamClosed("it closed the connection");
      } else {
        wait_or_throw(POLLIN);
      }
    }
  }

  /// After a call that failed with errno.
  void wait_or_throw(short events) {
    if (errno == EINTR) {
      return;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      throw StreamClosed(std::strerror(errno));
    }
    if (wait_for(fd_, events, deadline_) == ETIMEDOUT) {
      throw StreamSilent();
    }
  }

  const int fd_;
  Deadline deadline_;
};

/// A socket that connects to a port of this host on which nobody listens may be
/// connected to itself.
bool is_connected_to_itself(int fd) {
  sockaddr_storage near{};
  sockaddr_storage far{};
  socklen_t near_size = sizeof near;
  socklen_t far_size = sizeof far;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&near), &near_size) == 0 &&
      getpeername(fd, reinterpret_cast<sockaddr*>(&far), &far_size) == 0 &&
      near_size == far_size && std::memcmp(&near, &far, near_size) == 0;
}

/// 0, or the errno of the attempt.
int reach(int fd, const addrinfo& address, Deadline deadline) {
  if (::connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) {
      return errno;
    }
    const auto patience = std::min(deadline, Clock::now() + kConnectPatience);
    if (const int error = wait_for(fd, POLLOUT, patience)) {
      return error;
    }
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      return error;
    }
  }
  if (is_connected_to_itself(fd)) {
    return ECONNREFUSED;
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  return 0;
}

/// See [Note: the secret].
void prove(Stream& stream, const std::string& secret) {
  const Nonce mine = make_nonce();
  Message hello;
  hello.number(wire::kHello);
  stream.send_bytes(hello.bytes() + std::string(view_of(mine)));
  const auto theirs = stream.array<Nonce>();
  const Proofs proofs(secret, mine, theirs);
  if (!is_same(stream.array<Digest>(), proofs.of_host())) {
    raise<c10::DistNetworkError>(
        {.call = "init"},
        "the store does not know this process's TESSERA_STORE_SECRET. Give all processes of the run the same one.");
  }
  Message proof;
  proof.number(wire::kProof);
  const Digest digest = proofs.of_client();
  stream.send_bytes(proof.bytes() + std::string(view_of(digest)));
}

/// Empty, or why this is not a store.
std::string greet(int fd, const std::string& secret, Deadline deadline) {
  constexpr const char* kNoStore =
      "something listens there, but it does not answer as a store";
  const auto nonce = static_cast<uint32_t>(getpid());
  try {
    Stream stream(fd, std::max(deadline, Clock::now() + kGreeting));
    if (secret.empty()) {
      stream.send(Message(Query::kValidate).number(wire::kMagic));
    } else {
      prove(stream, secret);
    }
    stream.send(Message(Query::kPing).number(nonce));
    return stream.number<uint32_t>() == nonce ? "" : kNoStore;
  } catch (const StreamSilent&) {
    return kNoStore;
  } catch (const StreamClosed& error) {
    return fmt::format(
        "{}; a store does so with processes of other users, and with those that do not have its TESSERA_STORE_SECRET",
        error.what());
  }
}

/// Empty, or who owns the store. Only after the store has answered: before, no
/// process has accepted the connection.
std::string find_stranger(int fd) {
  const PeerOwner owner = owner_of_peer(fd);
  if (owner.kind == PeerOwner::Kind::kGone) {
    return "it closed the connection";
  }
  if (owner.kind == PeerOwner::Kind::kUser && !owner.is_ours()) {
    return fmt::format(
        "user {} listens there, and this process is of user {}",
        owner.uid,
        geteuid());
  }
  return "";
}

std::string meet(int fd, const std::string& secret, Deadline deadline) {
  const std::string problem = greet(fd, secret, deadline);
  return problem.empty() && secret.empty() ? find_stranger(fd) : problem;
}

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
bool call_off(Stream& stream) {
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
    Stream& stream,
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

UniqueFd connect_to_store(
    const AddressList& addresses,
    const std::string& secret,
    Deadline deadline,
    std::string& problem) {
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    UniqueFd socket(
        ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int error = socket ? reach(socket.get(), *at, deadline) : errno;
    // What listens on this address may be another program; the store may be on
    // the next.
    const Deadline patience = at->ai_next == nullptr
        ? deadline
        : std::min(deadline, Clock::now() + kConnectPatience);
    problem = error == 0 ? meet(socket.get(), secret, patience)
                         : std::strerror(error);
    if (problem.empty()) {
      return socket;
    }
  }
  return UniqueFd();
}

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
      Stream stream(socket_.get(), after(time_for_answer()));
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
  call([&](Stream& stream) {
    stream.send(Message(Query::kSet).key(key).text(text_of(value)));
  });
}

std::vector<uint8_t> StoreClient::compareSet(
    const std::string& key,
    const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return call([&](Stream& stream) {
    stream.send(Message(Query::kCompareSet)
                    .key(key)
                    .text(text_of(expected))
                    .text(text_of(desired)));
    return stream.bytes();
  });
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  return call([&](Stream& stream) {
    wait_on(stream, {key}, timeout_);
    stream.set_deadline(after(time_for_answer()));
    stream.send(Message(Query::kGet).key(key));
    return stream.bytes();
  });
}

int64_t StoreClient::add(const std::string& key, int64_t amount) {
  return call([&](Stream& stream) {
    stream.send(Message(Query::kAdd).key(key).number(amount));
    return stream.number<int64_t>();
  });
}

bool StoreClient::deleteKey(const std::string& key) {
  return call([&](Stream& stream) {
    stream.send(Message(Query::kDelete).key(key));
    return stream.number<int64_t>() == 1;
  });
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  return call([&](Stream& stream) {
    stream.send(about(Query::kCheck, keys));
    return stream.number<wire::Presence>() == wire::Presence::kAllThere;
  });
}

int64_t StoreClient::getNumKeys() {
  return call([](Stream& stream) {
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
  call([&](Stream& stream) { wait_on(stream, keys, timeout); });
}

void StoreClient::append(
    const std::string& key,
    const std::vector<uint8_t>& value) {
  call([&](Stream& stream) {
    stream.send(Message(Query::kAppend).key(key).text(text_of(value)));
  });
}

std::vector<std::vector<uint8_t>> StoreClient::multiGet(
    const std::vector<std::string>& keys) {
  return call([&](Stream& stream) {
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
  call([&](Stream& stream) {
    Message message(Query::kMultiSet);
    message.number<uint64_t>(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      message.key(keys[i]).text(text_of(values[i]));
    }
    stream.send(message);
  });
}

} // namespace tessera::comm
