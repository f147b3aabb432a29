// What a group does when an operation fails: it finds out which rank is
// missing, tells the others, and throws.
#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/diagnostics/describe_call.h"
#include "comm/group/group_impl.h"
#include "comm/group/long_wait.h"
#include "comm/shm/channel.h"

namespace tessera::comm {
namespace {

/// How long the survivors of a failure wait to learn who else survived.
constexpr Milliseconds kRollCall{2000};
/// How long a rank that refuses a step waits for the others to refuse it too.
constexpr Milliseconds kRefusals{5000};
/// How often a waiting rank checks whether a peer has failed.
constexpr Milliseconds kLookout{200};
constexpr const char* kAnyFailed = "roll_call/any";
/// How the announcement of give_up() begins; the rest is for the peers' users.
constexpr const char* kGaveUp = "!";
/// How it begins if ranks have made different calls.
constexpr const char* kDiffered = "?";

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

/// Returns when `done` says so, or after `limit`.
template <class Done>
void poll_for(Milliseconds limit, const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(Milliseconds(25));
  }
}

} // namespace

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
  store_->set("roll_call/" + std::to_string(rank_), call.describe());
  std::vector<int> missing;
  std::vector<int> present;
  poll_for(kRollCall, [&] {
    missing.clear();
    present.clear();
    for (int peer = 0; peer < size(); ++peer) {
      (reported(peer) ? present : missing).push_back(peer);
    }
    return missing.empty();
  });
  try {
    store_->set("roll_call_answered/" + std::to_string(rank_), "1");
    poll_for(kRollCall, [&] {
      return std::all_of(present.begin(), present.end(), answered);
    });
  } catch (const std::exception&) {
    // The store is gone, and with it every rank that could need an answer.
  }
  for (int& rank : missing) {
    rank = global_ranks_[static_cast<size_t>(rank)];
  }
  return missing;
}

void GroupImpl::wait_for(c10d::Work& work) const {
  LongWait wait(
      store_,
      cpu_->can.compares_calls ? nullptr : &recent_,
      rank_,
      global_ranks_);
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
      if (const auto difference = wait.look()) {
        announce_failure(kDiffered + *difference);
        any_failed = true;
      }
    } catch (const std::exception&) {
      // The store is gone; the operation ends by itself or at its timeout.
    }
    if (any_failed) {
      throw std::runtime_error("Connection given up by a peer");
    }
  }
}

std::string GroupImpl::announce_failure(const std::string& reason) const {
  if (!store_) { // peers that are not there
    return reason;
  }
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

void GroupImpl::die(const Call& call, const std::string& reason) {
  if (!dead_reason_.empty()) {
    return; // of several operations under way, the first that failed counts
  }
  dead_reason_ = reason;
  if (cpu_->can.shares_memory) {
    return; // peers that share memory learn of it there
  }
  const std::string mine = fmt::format(
      "{}{} gave this group up: {}",
      kGaveUp,
      rank_list({&world_->rank, 1}),
      dead_reason_);
  const std::string first = announce_failure(mine);
  cpu_->backend()->abort();
  if (first != mine && first.starts_with(kGaveUp)) {
    dead_reason_ = first.substr(std::strlen(kGaveUp));
  }
  wait_for_readers(call);
}

bool GroupImpl::refuse(const std::string& step, const std::string& reason) {
  if (size() == 1) {
    return true;
  }
  if (!dead_reason_.empty()) {
    return false;
  }
  ++num_refused_;
  bool all_refused = !store_; // fake peers do as this rank does
  if (store_) {
    try {
      std::vector<std::string> refusals;
      for (int peer = 0; peer < size(); ++peer) {
        refusals.push_back(
            fmt::format("refused/{}/{}/{}", num_refused_, step, peer));
      }
      store_->set(refusals[static_cast<size_t>(rank_)], "1");
      poll_for(kRefusals, [&] {
        all_refused = store_->check(refusals);
        return all_refused || store_->check({kAnyFailed});
      });
    } catch (const std::exception&) {
      // Without a store nobody can be asked: the group is given up.
    }
  }
  if (!all_refused) {
    give_up(reason);
  }
  return all_refused;
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
        die(call, channel.what());
        raise_error<TimeoutError>(call.operation, what);
      case shm::ChannelError::Kind::PeerLost:
      case shm::ChannelError::Kind::Aborted:
        die(call, channel.what());
        raise_error<PeerLostError>(
            call.operation, dead_reason_ + " (in " + what_call + ")");
    }
    throw;
  } catch (const std::exception& other) {
    if (!dead_reason_.empty()) { // the peers have been told, and why
      raise_error<PeerLostError>(
          call.operation, dead_reason_ + " (in " + what_call + ")");
    }
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
    if (first.starts_with(kDiffered)) {
      cpu_->backend()->abort();
      dead_reason_ = first.substr(std::strlen(kDiffered));
      wait_for_readers(call);
      raise_error<DisagreementError>(call.operation, dead_reason_);
    }
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

} // namespace tessera::comm
