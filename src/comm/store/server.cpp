#include "comm/store/server.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/store/peer_owner.h"
#include "comm/store/secret.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using wire::Message;
using wire::Query;

/// A number for a client, never given twice, unlike descriptors.
using ClientId = uint64_t;
constexpr ClientId kListener = 0;
constexpr ClientId kStop = 1;
constexpr ClientId kFirstClient = 2;

/// A client that leaves more than this unread is cut off.
constexpr size_t kMaxUnsent = 64 * 1024 * 1024;
/// How long to wait before accepting again, after descriptors ran out.
constexpr int kPauseMs = 100;

[[noreturn]] void throw_errno() {
  throw std::system_error(errno, std::generic_category());
}

/// A thread that is started while this lives gets no signals, which are for the
/// program's threads. The thread does get the signals of its own faults.
class NoSignals {
 public:
  NoSignals() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault :
         {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&signals, fault);
    }
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~NoSignals() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

/// Why the owner of a connection is not known.
const char* reason_of(PeerOwner::Kind kind) {
  switch (kind) {
    case PeerOwner::Kind::kUnmapped:
      return "its user has no number in this user namespace";
    case PeerOwner::Kind::kTranslated:
      return "a translation of addresses (NAT) hides whose it is";
    default:
      return "neither sock_diag nor /proc/net/tcp tells whose it is";
  }
}

/// A fraction of the descriptors that this process may have.
size_t strangers_allowed(size_t most) {
  rlimit descriptors{};
  if (getrlimit(RLIMIT_NOFILE, &descriptors) != 0) {
    return most;
  }
  return std::clamp<size_t>(descriptors.rlim_cur / 4, 1, most);
}

/// As c10d reads numbers, with spaces before and anything after them.
int64_t to_number(const std::string& text) {
  try {
    return std::stoll(text);
  } catch (const std::logic_error&) {
    throw wire::BadRequest("the value is not a number");
  }
}

struct StoreFull : wire::BadRequest {
  using BadRequest::BadRequest;
};

/// The keys and values, and which client waits for which key.
class Contents {
 public:
  using Reply = std::function<void(ClientId, const Message&)>;

  Contents(size_t max_bytes, Reply reply)
      : max_bytes_(max_bytes), reply_(std::move(reply)) {}

  /// Throws BadRequest, with nothing changed.
  void handle(ClientId client, const wire::Request& request) {
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
          if (all.bytes().size() > kMaxUnsent) {
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
        const bool all_there = std::all_of(
            request.keys.begin(), request.keys.end(), [&](auto name) {
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

  /// The client no longer waits for any key.
  void forget(ClientId client) {
    if (awaited_.erase(client) == 0) {
      return;
    }
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      held_ -= std::erase(at->second, client) * cost(at->first);
      at = at->second.empty() ? waiting_.erase(at) : std::next(at);
    }
  }

 private:
  std::string_view value_of(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? std::string_view() : found->second;
  }

  int64_t length_of_queue(const std::string& key) const {
    const auto found = queues_.find(key);
    return found == queues_.end() ? 0
                                  : static_cast<int64_t>(found->second.size());
  }

  bool is_there(const std::string& key) const {
    return values_.contains(key) || length_of_queue(key) > 0;
  }

  /// About the bytes that an entry takes.
  static size_t cost(std::string_view key, std::string_view value = {}) {
    constexpr size_t kEntry = 96;
    return kEntry + key.size() + value.size();
  }

  /// Counts as if no value were replaced.
  void require_room(size_t bytes) const {
    if (held_ + bytes > max_bytes_) {
      throw StoreFull("the store is full");
    }
  }
  void require_room(const wire::Request& request) const {
    size_t bytes = 0;
    for (size_t i = 0; i < request.keys.size(); ++i) {
      bytes += cost(request.keys[i], request.values[i]);
    }
    require_room(bytes);
  }

  /// Wakes nobody.
  void put(const std::string& key, std::string value) {
    require_room(cost(key, value));
    erase(key);
    held_ += cost(key, value);
    values_.emplace(key, std::move(value));
  }

  int64_t erase(const std::string& key) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      return 0;
    }
    held_ -= cost(key, found->second);
    values_.erase(found);
    return 1;
  }

  void set(const std::string& key, std::string value) {
    put(key, std::move(value));
    wake_all(key);
  }

  void push(const std::string& key, std::string_view value) {
    require_room(cost(key, value));
    queues_[key].emplace_back(value);
    held_ += cost(key, value);
  }

  void append(const std::string& key, std::string_view more) {
    if (value_of(key).size() + more.size() > wire::kMaxValueBytes) {
      throw wire::BadRequest("the value gets too long");
    }
    put(key, std::string(value_of(key)).append(more));
    wake_all(key);
  }

  std::string compare_set(
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

  /// The sum afterwards. Wakes nobody.
  int64_t count(const std::string& key, int64_t amount) {
    const auto found = values_.find(key);
    const int64_t before =
        found == values_.end() ? 0 : to_number(found->second);
    int64_t sum = 0;
    if (__builtin_add_overflow(before, amount, &sum)) {
      throw wire::BadRequest("the sum is too large");
    }
    put(key, std::to_string(sum));
    return sum;
  }

  Message pop(const std::string& key) {
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

  void come_to_barrier(ClientId client, const std::string& key, int64_t size) {
    if (count(key, 1) >= size) {
      wake_all(key);
      end_wait(client);
    } else {
      forget(client);
      await(client, key);
    }
  }

  void wait(ClientId client, const std::vector<std::string_view>& keys) {
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

  void await(ClientId client, const std::string& key) {
    require_room(cost(key));
    held_ += cost(key);
    waiting_[key].push_back(client);
    ++awaited_[client];
  }

  void end_wait(ClientId client) {
    reply_(client, Message().number(wire::WaitEnd::kDone));
  }

  void wake_all(const std::string& key) {
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
  void wake_one(const std::string& key) {
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
  bool count_down(ClientId client) {
    const auto found = awaited_.find(client);
    if (found == awaited_.end() || --found->second > 0) {
      return false;
    }
    awaited_.erase(found);
    end_wait(client);
    return true;
  }

  const size_t max_bytes_;
  const Reply reply_;
  size_t held_ = 0; // bytes of all of these; see cost()
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::unordered_map<std::string, std::vector<ClientId>> waiting_; // by key
  std::unordered_map<ClientId, size_t> awaited_; // how many keys each waits for
};

/// Everything that the thread owns.
class Loop {
 public:
  Loop(
      UniqueFd listener,
      int stop,
      std::string secret,
      const StoreLimits& limits)
      : listener_(std::move(listener)),
        secret_(std::move(secret)),
        limits_(limits),
        max_strangers_(strangers_allowed(limits.strangers)),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        contents_(
            limits.stored_bytes,
            [this](ClientId client, const Message& message) {
              send(client, message.bytes());
            }) {
    fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
    if (!epoll_ || !watch(listener_.get(), kListener) || !watch(stop, kStop)) {
      throw_errno();
    }
  }

  void run() {
    std::vector<epoll_event> events(256);
    for (;;) {
      const int count = epoll_wait(
          epoll_.get(),
          events.data(),
          static_cast<int>(events.size()),
          is_accepting_ ? -1 : kPauseMs);
      if (!is_accepting_) {
        is_accepting_ = watch(listener_.get(), kListener);
      }
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        if (event.data.u64 == kStop) {
          return;
        }
        if (event.data.u64 == kListener) {
          accept_clients();
        } else {
          serve(event.data.u64, event.events);
        }
      }
      for (const ClientId client : std::exchange(lost_, {})) {
        clients_.erase(client);
      }
    }
  }

 private:
  struct Client {
    UniqueFd socket;
    std::string received; // the beginning of a request
    size_t needed = 1; // bytes of `received` before it is parsed again
    std::string unsent;
    size_t sent = 0; // bytes of `unsent`
    uint32_t watched = EPOLLIN;
    std::optional<Proofs> proofs; // once the client said hello
    bool is_greeted = false;
    bool is_lost = false;
    size_t counted = 0; // bytes of this client in buffered_
  };

  bool watch(int fd, ClientId id) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  void accept_clients() {
    for (;;) {
      UniqueFd socket(accept4(
          listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == ECONNABORTED || errno == EINTR) {
          continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) { // no descriptor left
          epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
          is_accepting_ = false;
        }
        return;
      }
      if (!may_enter(socket.get())) {
        continue;
      }
      const int on = 1;
      setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      const ClientId id = next_++;
      if (watch(socket.get(), id)) {
        clients_[id].socket = std::move(socket);
        strangers_.insert(id);
        show_a_stranger_out();
      }
    }
  }

  /// A connection that nothing was read from yet.
  bool may_enter(int socket) {
    if (!secret_.empty()) {
      return true; // the client has to prove that it knows the secret
    }
    const PeerOwner owner = owner_of_peer(socket);
    if (owner.kind == PeerOwner::Kind::kGone) {
      return false;
    }
    if (owner.is_unknown()) {
      if (!std::exchange(has_told_of_unknown_, true)) {
        TORCH_WARN(
            "[store] a process of this host connected, and ",
            reason_of(owner.kind),
            ". It is served, as all such are. Set TESSERA_STORE_SECRET on all ranks where other users share this machine.");
      }
      return true;
    }
    const bool is_welcome =
        owner.kind == PeerOwner::Kind::kElsewhere || owner.is_ours();
    if (!is_welcome && !std::exchange(has_told_of_others_, true)) {
      TORCH_WARN(
          "[store] refused a connection of user ",
          owner.uid,
          " on this host: the store serves user ",
          geteuid(),
          " and root. It will refuse others without a word. Ranks of different users need TESSERA_STORE_SECRET.");
    }
    return is_welcome;
  }

  /// Where there are too many, closes the one that has waited longest and said
  /// nothing.
  void show_a_stranger_out() {
    while (strangers_.size() > max_strangers_) {
      const ClientId id = *strangers_.begin();
      Client& client = clients_.at(id);
      receive(id, client); // the client may have greeted just now
      if (!client.is_greeted) {
        lose(id, client);
        clients_.erase(id); // the descriptor is needed now
      }
    }
  }

  void serve(ClientId id, uint32_t events) {
    const auto found = clients_.find(id);
    if (found == clients_.end() || found->second.is_lost) {
      return;
    }
    Client& client = found->second;
    if ((events & EPOLLOUT) != 0) {
      flush(id, client);
      count_bytes_of(client);
    }
    if ((events & ~EPOLLOUT) != 0 && !client.is_lost) {
      receive(id, client);
    }
  }

  void receive(ClientId id, Client& client) {
    char bytes[64 * 1024];
    const ssize_t count = recv(client.socket.get(), bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    if (count <= 0) {
      lose(id, client);
      return;
    }
    try {
      client.received.append(bytes, static_cast<size_t>(count));
      if (client.received.size() >= client.needed) {
        handle_requests(id, client);
      }
    } catch (const StoreFull&) {
      if (!std::exchange(has_told_of_full_, true)) {
        TORCH_WARN(
            "[store] it is full (",
            limits_.stored_bytes >> 20,
            " MiB): clients that want to add to it are cut off. It is for meeting: send data with a collective.");
      }
      lose(id, client);
    } catch (const std::exception&) { // nonsense, or more than memory holds
      lose(id, client);
    }
    count_bytes_of(client);
  }

  /// Keeps the buffers of all clients together within their limit.
  void count_bytes_of(Client& client) {
    const size_t now =
        client.is_lost ? 0 : client.received.size() + client.unsent.size();
    buffered_ += now - std::exchange(client.counted, now);
    while (buffered_ > limits_.buffered_bytes) {
      const auto largest = std::max_element(
          clients_.begin(), clients_.end(), [](const auto& a, const auto& b) {
            return a.second.counted < b.second.counted;
          });
      reset(largest->second);
      lose(largest->first, largest->second);
    }
  }

  /// When the socket is closed, the kernel drops what it has not sent.
  static void reset(Client& client) {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(client.socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }

  void handle_requests(ClientId id, Client& client) {
    std::string_view rest = client.received;
    while (!client.is_lost && take_greeting(id, client, rest)) {
      const auto request = wire::take_request(rest, client.needed);
      if (!request) {
        break;
      }
      require_magic(*request);
      contents_.handle(id, *request);
    }
    client.received.erase(0, client.received.size() - rest.size());
  }

  static void require_magic(const wire::Request& request) {
    if (request.query == Query::kValidate && request.number != wire::kMagic) {
      throw wire::BadRequest("this is not a client of a store");
    }
  }

  /// True once the greeting is complete.
  bool take_greeting(ClientId id, Client& client, std::string_view& rest) {
    if (!client.is_greeted) {
      client.is_greeted = secret_.empty() ? take_validation(client, rest)
                                          : take_proof(id, client, rest);
      if (client.is_greeted) {
        strangers_.erase(id);
        client.needed = 1;
      }
    }
    return client.is_greeted;
  }

  static bool take_validation(Client& client, std::string_view& rest) {
    require_kind(rest, static_cast<uint8_t>(Query::kValidate));
    const auto request = wire::take_request(rest, client.needed);
    if (request) {
      require_magic(*request);
    }
    return request.has_value();
  }

  /// See [Note: the secret].
  bool take_proof(ClientId id, Client& client, std::string_view& rest) {
    if (!client.proofs) {
      if (const auto nonce = take_array<Nonce>(wire::kHello, client, rest)) {
        const Nonce mine = make_nonce();
        client.proofs.emplace(secret_, *nonce, mine);
        const Digest proof = client.proofs->of_host();
        send(id, std::string(view_of(mine)).append(view_of(proof)));
      }
    }
    if (!client.proofs) {
      return false;
    }
    const auto proof = take_array<Digest>(wire::kProof, client, rest);
    if (proof && !is_same(*proof, client.proofs->of_client())) {
      throw wire::BadRequest("the client does not know the secret");
    }
    return proof.has_value();
  }

  static void require_kind(std::string_view bytes, uint8_t kind) {
    if (!bytes.empty() && static_cast<uint8_t>(bytes.front()) != kind) {
      throw wire::BadRequest("this is not a client of a store");
    }
  }

  template <class Array>
  static std::optional<Array> take_array(
      uint8_t kind,
      Client& client,
      std::string_view& rest) {
    require_kind(rest, kind);
    Array array;
    client.needed = 1 + array.size();
    if (rest.size() < client.needed) {
      return std::nullopt;
    }
    std::memcpy(array.data(), rest.data() + 1, array.size());
    rest.remove_prefix(client.needed);
    return array;
  }

  void send(ClientId id, std::string_view bytes) {
    Client& client = clients_.at(id);
    if (client.is_lost) {
      return;
    }
    const bool is_first = client.unsent.empty();
    client.unsent += bytes;
    if (client.unsent.size() - client.sent > kMaxUnsent) {
      reset(client);
      lose(id, client);
    } else if (is_first) {
      flush(id, client);
    }
    count_bytes_of(client);
  }

  void flush(ClientId id, Client& client) {
    const std::string_view rest =
        std::string_view(client.unsent).substr(client.sent);
    const ssize_t count =
        ::send(client.socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) {
      lose(id, client);
      return;
    }
    client.sent += static_cast<size_t>(std::max<ssize_t>(count, 0));
    if (client.sent > client.unsent.size() / 2) { // seldom enough to be cheap
      client.unsent.erase(0, std::exchange(client.sent, 0));
    }
    const uint32_t wanted =
        client.unsent.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
    if (std::exchange(client.watched, wanted) != wanted) {
      epoll_event event{.events = wanted, .data = {.u64 = id}};
      epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, client.socket.get(), &event);
    }
  }

  /// The client is removed once nobody uses it.
  void lose(ClientId id, Client& client) {
    if (!client.is_lost) {
      client.is_lost = true;
      buffered_ -= std::exchange(client.counted, 0);
      strangers_.erase(id);
      contents_.forget(id);
      lost_.push_back(id);
    }
  }

  const UniqueFd listener_;
  const std::string secret_;
  const StoreLimits limits_;
  const size_t max_strangers_;
  const UniqueFd epoll_;
  bool is_accepting_ = true;
  bool has_told_of_unknown_ = false;
  bool has_told_of_others_ = false;
  bool has_told_of_full_ = false;
  ClientId next_ = kFirstClient;
  std::unordered_map<ClientId, Client> clients_;
  std::set<ClientId> strangers_; // have not greeted; oldest first
  size_t buffered_ = 0; // bytes in the buffers of all clients
  std::vector<ClientId> lost_;
  Contents contents_;
};

} // namespace

StoreServer::StoreServer(
    UniqueFd listener,
    std::string secret,
    const StoreLimits& limits)
    : owner_(getpid()), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) {
    throw_errno();
  }
  auto loop = std::make_unique<Loop>(
      std::move(listener), stop_.get(), std::move(secret), limits);
  const NoSignals none;
  thread_ = std::thread([loop = std::move(loop)] {
    pthread_setname_np(pthread_self(), "tessera_store");
    loop->run();
  });
}

StoreServer::~StoreServer() {
  if (getpid() != owner_) {
    thread_.detach();
    return;
  }
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

} // namespace tessera::comm
