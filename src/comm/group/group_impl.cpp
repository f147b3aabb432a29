#include "comm/group/group_impl.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/diagnostics/current_call.h"
#include "comm/diagnostics/describe.h"
#include "comm/diagnostics/observer.h"
#include "comm/diagnostics/traced.h"
#include "comm/shm/channel.h"

namespace tessera::comm {
namespace {

/// How long the survivors of a failure wait to learn who else survived.
constexpr Milliseconds kRollCall{2000};
/// How often a waiting rank checks whether a peer has failed.
constexpr Milliseconds kLookout{200};
constexpr const char* kAnyFailed = "roll_call/any";
/// How the announcement of give_up() begins; the rest is for the peers' users.
constexpr const char* kGaveUp = "!";

/// Gloo and NCCL put a stack trace behind their message.
std::string first_line(const char* text) {
  const std::string_view all = text;
  return std::string(all.substr(0, all.find('\n')));
}

bool says_any(
    const std::string& message,
    std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* word) {
    return message.find(word) != std::string::npos;
  });
}

bool says_timeout(const std::string& message) {
  return says_any(message, {"imed out", "imeout"});
}

bool says_connection_broke(const std::string& message) {
  return says_any(
      message,
      {"onnection", "ocket", "roken pipe", "y peer", "Read error", "recv"});
}

int count_on_host(const WorldInfo& world) {
  const int here = world.host_of[static_cast<size_t>(world.rank)];
  return static_cast<int>(
      std::count(world.host_of.begin(), world.host_of.end(), here));
}

bool on_one_host(const WorldInfo& world, const std::vector<int>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return world.host_of[static_cast<size_t>(rank)] ==
        world.host_of[static_cast<size_t>(ranks.front())];
  });
}

/// Warns once per process, though many groups may have the same reason.
void warn_about_gloo(const char* reason) {
  static std::once_flag once;
  std::call_once(once, [&] {
    TORCH_WARN(
        reason,
        " All ranks use it now, though it is slower; TESSERA_BACKEND=shm makes this an error.");
  });
}

/// A wait that observers are told of.
class WatchedWait {
 public:
  WatchedWait(uint64_t id, const Call& call, bool on_device)
      : id_(id), call_(call), on_device_(on_device) {
    tell({CallEvent::Kind::WaitStarts, id_, call_, on_device_});
  }
  ~WatchedWait() {
    tell({CallEvent::Kind::WaitEnded, id_, call_, on_device_});
  }
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;

 private:
  const uint64_t id_;
  const Call& call_;
  const bool on_device_;
};

void tell_when_ended(
    c10d::Work& work,
    uint64_t id,
    const Call& call,
    bool on_device) {
  if (id == 0) {
    return;
  }
  work.getFuture()->addCallback([id, call, on_device](auto&) {
    tell({CallEvent::Kind::Ended, id, call, on_device});
  });
}

} // namespace

GroupImpl::GroupImpl(
    std::shared_ptr<const WorldInfo> world,
    StorePtr store,
    std::string name,
    std::vector<int> global_ranks)
    : world_(std::move(world)),
      store_(std::move(store)),
      name_(std::move(name)),
      global_ranks_(std::move(global_ranks)) {
  const auto mine =
      std::find(global_ranks_.begin(), global_ranks_.end(), world_->rank);
  TESSERA_INTERNAL_ASSERT(
      mine != global_ranks_.end(), "a rank makes a group it is not in");
  rank_ = static_cast<int>(mine - global_ranks_.begin());
  if (size() == 1) {
    return;
  }
  BackendConfig config{
      .store = store_,
      .rank = rank_,
      .global_ranks = global_ranks_,
      .timeout = world_->timeout,
      .address = world_->address,
      .ranks_on_host = count_on_host(*world_),
      .call = size() == world_->size() ? "init" : "split"};
  cpu_ = make_cpu_carrier(config);
  process_group_ =
      c10::make_intrusive<c10d::ProcessGroup>(store_, rank_, size());
  process_group_->setBackend(
      c10::DeviceType::CPU, cpu_->can.c10d_type, cpu_->backend());
  process_group_->setDefaultBackend(cpu_->can.c10d_type);
  if (world_->use_nccl) {
    config.store = c10::make_intrusive<c10d::PrefixStore>("nccl", store_);
    cuda_ = make_nccl_backend(config);
    process_group_->setBackend(
        c10::DeviceType::CUDA, cuda_->can.c10d_type, cuda_->backend());
  }
  // Unique in this process: a group may be made again under the same name.
  static std::atomic<int> num_registered{0};
  registered_name_ = fmt::format("tessera/{}#{}", name_, num_registered++);
  process_group_->setGroupName(registered_name_);
  c10d::register_process_group(registered_name_, process_group_);
}

GroupImpl::~GroupImpl() {
  if (getpid() != owner_) {
    leave_to_owner();
    return;
  }
  if (cuda_) {
    try {
      cuda_->backend()
          ->shutdown(); // NCCL warns at exit about groups that were not
    } catch (const std::exception&) {
      // A communicator that failed earlier; its error was reported then.
    }
  }
  if (process_group_) {
    c10d::unregister_process_group(registered_name_);
  }
}

void GroupImpl::leave_to_owner() {
  (void)process_group_.release();
  (void)new CarrierPtr(std::move(cuda_));
  (void)new CarrierPtr(std::move(cpu_));
}

CarrierPtr GroupImpl::make_cpu_carrier(const BackendConfig& config) const {
  const std::string& wanted = world_->backend;
  if (wanted == "fake") {
    return make_fake_backend(config);
  }
  const bool can_share = on_one_host(*world_, global_ranks_);
  if (wanted == "shm" && !can_share) {
    raise_error<c10::ValueError>(
        "init",
        "the backend \"shm\" was asked for, but the ranks of this group are on several hosts, or on one in different containers, namespaces or accounts. Use \"auto\", which takes Gloo there.");
  }
  if (wanted != "gloo" && can_share) {
    try {
      return make_shm_backend(config);
    } catch (const CannotShareMemory& error) { // on all ranks
      if (wanted == "shm") {
        throw;
      }
      if (rank_ == 0) {
        warn_about_gloo(error.what());
      }
    }
  }
  return make_gloo_backend(config);
}

Work GroupImpl::launch(
    const Request& request,
    const at::Tensor& input,
    const Start& start,
    std::function<void()> finish) {
  Call call =
      describe_call(request.operation, input, request.suffix, request.label);
  call.sequence = sequence_++;
  if (!dead_reason_.empty()) {
    raise_error<PeerLostError>(
        request.operation,
        "this group failed earlier and cannot be used again: " + dead_reason_ +
            " Start again, or shut down and call init() on every rank.");
  }
  const auto device =
      input.defined() ? input.device().type() : c10::DeviceType::CPU;
  const CarrierPtr& carrier = this->carrier(device);

  note_call_begins(call, name_.c_str());
  const bool on_host = carrier != cuda_;
  const uint64_t id = next_watched_call();
  tell({CallEvent::Kind::Starts, id, call, !on_host});
  WorkPtr work;
  try {
    std::optional<TracedRange> range;
    if (!carrier->can.traces_calls) {
      range.emplace([&] { return trace_name(call); });
    }
    const WatchedWait waiting(request.async ? 0 : id, call, !on_host);
    if (world_->compare_calls && !carrier->can.compares_calls) {
      compare_calls(call);
    }
    work = start(*carrier, call, request.async);
    if (request.async) {
      note_call_ends(); // begins again in wait()
    }
  } catch (...) {
    note_call_ends();
    fail(call, std::current_exception());
  }
  tell_when_ended(*work, id, call, !on_host);
  return Work(std::make_shared<Work::Pending>(
      shared_from_this(),
      call,
      std::move(work),
      on_host,
      std::move(finish),
      id));
}

void GroupImpl::compare_calls(const Call& call) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Call));
  at::Tensor mine = at::empty({kBytes}, at::kByte);
  at::Tensor all = at::empty({size() * kBytes}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &call, sizeof call);
  wait_for(*cpu_->backend()->_allgather_base(all, mine, {}));
  std::vector<Call> calls(static_cast<size_t>(size()));
  std::memcpy(calls.data(), all.const_data_ptr(), all.nbytes());
  if (auto text = describe_mismatch(calls, global_ranks_)) {
    raise_error<DisagreementError>(call.operation, *text);
  }
}

/// A rank that does not report within kRollCall is not in this operation: every
/// rank in the operation fails too, since a broken connection is noticed at
/// both ends. A rank leaves once all that reported have their answer, or
/// kRollCall has passed once more: the rank that leaves may host the store they
/// ask.
std::vector<int> GroupImpl::find_missing(const Call& call) {
  const auto reported = [this](int peer) {
    return store_->check({"roll_call/" + std::to_string(peer)});
  };
  const auto answered = [this](int peer) {
    return store_->check({"roll_call_answered/" + std::to_string(peer)});
  };
  const auto poll_for_a_moment = [](const auto& done) {
    const auto deadline = std::chrono::steady_clock::now() + kRollCall;
    while (!done() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(Milliseconds(25));
    }
  };
  store_->set("roll_call/" + std::to_string(rank_), call.describe());
  std::vector<int> missing;
  std::vector<int> present;
  poll_for_a_moment([&] {
    missing.clear();
    present.clear();
    for (int peer = 0; peer < size(); ++peer) {
      (reported(peer) ? present : missing).push_back(peer);
    }
    return missing.empty();
  });
  try {
    store_->set("roll_call_answered/" + std::to_string(rank_), "1");
    poll_for_a_moment(
        [&] { return std::all_of(present.begin(), present.end(), answered); });
  } catch (const std::exception&) {
    // The store is gone, and with it every rank that could need an answer.
  }
  for (int& rank : missing) {
    rank = global_ranks_[static_cast<size_t>(rank)];
  }
  return missing;
}

void GroupImpl::wait_for(c10d::Work& work) const {
  while (true) {
    try {
      work.wait(kLookout);
      return;
    } catch (const c10::Error&) {
      if (work.isCompleted()) { // perhaps just now: take its result or error
        work.wait();
        return;
      }
    }
    bool any_failed = false;
    try {
      any_failed = store_ && store_->check({kAnyFailed});
    } catch (const std::exception&) {
      // The store is gone; the operation ends by itself or at its timeout.
    }
    if (any_failed) {
      throw std::runtime_error("Connection given up by a peer");
    }
  }
}

std::string GroupImpl::announce_failure(const std::string& reason) const {
  try {
    const std::vector<uint8_t> mine(reason.begin(), reason.end());
    const auto first = store_->compareSet(kAnyFailed, {}, mine);
    return {first.begin(), first.end()};
  } catch (const std::exception&) {
    return reason; // without a store peers learn from their connections
  }
}

void GroupImpl::wait_for_readers(const Call& call) {
  try {
    (void)find_missing(call);
  } catch (const std::exception&) {
    // The store is gone, so nobody can read the reason there.
  }
}

void GroupImpl::give_up(const std::string& reason) {
  if (size() == 1 || !dead_reason_.empty()) {
    return;
  }
  dead_reason_ = reason;
  if (!store_) { // fake peers wait for nobody
    return;
  }
  announce_failure(fmt::format(
      "{}{} gave this group up: {}",
      kGaveUp,
      rank_list({&world_->rank, 1}),
      reason));
  cpu_->give_up(reason);
  if (!cpu_->can.shares_memory) {
    wait_for_readers({});
  }
}

void GroupImpl::fail(const Call& call, std::exception_ptr error) {
  const std::string what_call = call.describe();
  try {
    std::rethrow_exception(std::move(error));
  } catch (const DisagreementError&) {
    throw;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const shm::ChannelError& channel) {
    const std::string what =
        std::string(channel.what()) + " (in " + what_call + ")";
    switch (channel.kind()) {
      case shm::ChannelError::Kind::Mismatch:
        raise_error<DisagreementError>(call.operation, channel.what());
      case shm::ChannelError::Kind::Timeout:
        dead_reason_ = channel.what();
        raise_error<TimeoutError>(call.operation, what);
      case shm::ChannelError::Kind::PeerLost:
      case shm::ChannelError::Kind::Aborted:
        dead_reason_ = channel.what();
        raise_error<PeerLostError>(call.operation, what);
    }
    throw;
  } catch (const std::exception& other) {
    const std::string message = first_line(other.what());
    if (!says_timeout(message) && !says_connection_broke(message)) {
      announce_failure(message);
      cpu_->backend()->abort();
      dead_reason_ = message;
      raise_error(call.operation, message + " (in " + what_call + ")");
    }
    // A rank whose peer timed out or gave up sees a broken connection: what the
    // first rank saw is what happened.
    const std::string first = announce_failure(message);
    if (first.starts_with(kGaveUp)) {
      cpu_->backend()->abort();
      dead_reason_ = first.substr(std::strlen(kGaveUp));
      wait_for_readers(call);
      raise_error<PeerLostError>(
          call.operation, dead_reason_ + " (in " + what_call + ")");
    }
    const bool timed_out = says_timeout(first);
    cpu_->backend()->abort(); // peers fail now, and answer the roll call
    std::string who = "which rank is missing could not be found out";
    try {
      const auto missing = find_missing(call);
      who = missing.empty()
          ? "all ranks are in it, so a connection or a host was too slow"
          : rank_list(missing) +
              " did not come: dead, or at another point of its program";
    } catch (const std::exception&) {
      who += " (the store is gone too; rank 0 or its launcher has ended)";
    }
    dead_reason_ = fmt::format(
        "{}: {}.",
        timed_out ? fmt::format(
                        "timed out after {:.1f} s",
                        std::chrono::duration<double>(world_->timeout).count())
                  : "a connection broke",
        who);
    const std::string what = fmt::format(
        "{} See that rank's own output, or raise the timeout if it is only slow. (in {}; the backend said: {})",
        dead_reason_,
        what_call,
        message);
    if (timed_out) {
      raise_error<TimeoutError>(call.operation, what);
    }
    raise_error<PeerLostError>(call.operation, what);
  }
}

PendingCall::PendingCall(
    std::shared_ptr<GroupImpl> group,
    const Call& call,
    WorkPtr work,
    bool on_host,
    std::function<void()> finish,
    uint64_t watched_as)
    : group_(std::move(group)),
      call_(call),
      on_host_(on_host),
      watched_as_(watched_as),
      work_(std::move(work)),
      finish_(std::move(finish)) {}

void PendingCall::wait() {
  if (!work_) {
    return;
  }
  const auto work = std::exchange(work_, nullptr);
  const auto finish = std::exchange(finish_, nullptr);
  note_call_begins(call_, group_->name().c_str());
  try {
    const TracedRange range([&] { return "wait for " + subject_of(call_); });
    const WatchedWait waiting(watched_as_, call_, !on_host_);
    if (on_host_) {
      group_->wait_for(*work);
    } else {
      work->wait();
    }
  } catch (...) {
    note_call_ends();
    group_->fail(call_, std::current_exception());
  }
  note_call_ends();
  if (finish) {
    finish();
  }
}

bool PendingCall::done() {
  return !work_ || work_->isCompleted();
}

} // namespace tessera::comm
