#include "comm/shm/channel.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "comm/shm/waiting.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kCacheLine = 64;

enum State : uint32_t { kActive = 0, kFailing = 1, kFailed = 2, kLeft = 3 };

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

Channel::Config with_names(Channel::Config config) {
  for (int rank = 0; config.names.size() < static_cast<size_t>(config.size);
       ++rank) {
    config.names.push_back(rank);
  }
  return config;
}

} // namespace

/// One rank's words in shared memory. Only `sleepers` is written by others.
struct alignas(128) Channel::Control {
  FutexWord published; // last step that this rank has published
  FutexWord sleepers; // peers asleep on `published`
  FutexWord state; // State; a reason goes with kFailed
  char reason[512]; // written by the thread that moved kActive to kFailing
  Call calls[2]; // by step parity, like the slots
};

size_t Channel::bytes_needed(int size, size_t slot_bytes) {
  const auto ranks = static_cast<size_t>(size);
  return round_up(ranks * sizeof(Control), kPage) +
      ranks * 2 * round_up(slot_bytes, kPage);
}

Channel::Channel(std::byte* base, Config config)
    : base_(base), config_(with_names(std::move(config))) {
  const size_t least = static_cast<size_t>(config_.size) * kCacheLine;
  if (config_.slot_bytes % kCacheLine != 0 || config_.slot_bytes < least) {
    throw std::invalid_argument(
        "a slot of " + std::to_string(config_.slot_bytes) +
        " bytes is not a multiple of 64 with 64 bytes for each rank");
  }
}

Channel::~Channel() {
  Control& mine = control(config_.rank);
  uint32_t expected = kActive;
  mine.state.compare_exchange_strong(expected, kLeft);
  futex_wake_all(mine.published);
}

Channel::Control& Channel::control(int rank) const {
  return reinterpret_cast<Control*>(base_)[rank];
}

std::byte* Channel::slot(int rank) const {
  const size_t controls =
      round_up(static_cast<size_t>(config_.size) * sizeof(Control), kPage);
  const size_t index = static_cast<size_t>(rank) * 2 + step_ % 2;
  return base_ + controls + index * round_up(config_.slot_bytes, kPage);
}

std::byte* Channel::begin_step() {
  if (!dead_reason_.empty()) {
    throw ChannelError(
        ChannelError::Kind::PeerLost,
        "this group failed earlier and cannot be used again: " + dead_reason_);
  }
  for (int peer = 0; peer < config_.size; ++peer) {
    wait_published(peer, step_);
  }
  ++step_;
  return slot(config_.rank);
}

void Channel::publish(const Call* call) {
  Control& mine = control(config_.rank);
  if (call != nullptr) {
    mine.calls[step_ % 2] = *call;
  }
  mine.published.store(step_, std::memory_order_seq_cst);
  wake_sleepers(mine.published, mine.sleepers);
}

const std::byte* Channel::wait_for(int peer) {
  wait_published(peer, step_);
  return slot(peer);
}

void Channel::wait_for_all() {
  for (int peer = 0; peer < config_.size; ++peer) {
    wait_published(peer, step_);
  }
}

const Call& Channel::call_of(int peer) const {
  return control(peer).calls[step_ % 2];
}

void Channel::check_calls() const {
  bool agree = true;
  for (int peer = 0; peer < config_.size; ++peer) {
    agree = agree && call_of(peer).matches(call_of(config_.rank));
  }
  if (agree) {
    return;
  }
  // Every rank sees the same calls, so every rank throws, with one text.
  std::vector<Call> calls;
  for (int peer = 0; peer < config_.size; ++peer) {
    calls.push_back(call_of(peer));
  }
  throw ChannelError(
      ChannelError::Kind::Mismatch,
      describe_mismatch(calls, config_.names).value());
}

void Channel::give_up(const std::string& reason) {
  fail(ChannelError::Kind::Aborted, reason);
}

void Channel::abort(const std::string& reason) {
  aborted_.store(true);
  tell_peers(reason);
  for (int peer = 0; peer < config_.size; ++peer) {
    futex_wake_all(control(peer).published);
  }
}

bool Channel::reached(int peer, uint32_t step) const {
  // Steps wrap after 2^32; ranks are never more than two apart.
  const uint32_t published =
      control(peer).published.load(std::memory_order_acquire);
  return static_cast<int32_t>(published - step) >= 0;
}

std::string Channel::name_of(std::span<const int> peers) const {
  std::vector<int> names;
  for (int peer : peers) {
    names.push_back(config_.names[static_cast<size_t>(peer)]);
  }
  return rank_list(names);
}

void Channel::wait_published(int peer, uint32_t step) {
  Control& theirs = control(peer);
  const bool came = wait_until(
      theirs.published,
      theirs.sleepers,
      config_.patience,
      [&] { return reached(peer, step); },
      [&] { throw_if_hopeless(step); });
  if (!came) {
    throw_timeout(step);
  }
}

std::optional<std::string> Channel::why_gone(int peer) const {
  const Control& theirs = control(peer);
  switch (theirs.state.load(std::memory_order_acquire)) {
    case kFailed:
      return name_of({&peer, 1}) + " gave this group up: " + theirs.reason;
    case kLeft:
      return name_of({&peer, 1}) +
          " has left the group (its process ended, or it destroyed the group) while this rank waits for it. See that rank's own output for the reason.";
    default:
      return std::nullopt;
  }
}

bool Channel::is_dead(int peer) const {
  return config_.is_alive && !config_.is_alive(peer);
}

std::string Channel::describe_death(std::span<const int> peers) const {
  return name_of(peers) +
      " died (process gone) while this rank waits. See the launcher's report or that rank's output; SIGKILL without a word is often the out-of-memory killer.";
}

void Channel::throw_if_hopeless(uint32_t step) {
  if (aborted_.load()) {
    const Control& mine = control(config_.rank);
    const bool is_known = mine.state.load(std::memory_order_acquire) == kFailed;
    fail(
        ChannelError::Kind::Aborted,
        is_known ? std::string("this group was given up: ") + mine.reason
                 : "the group was given up while an operation was waiting");
  }
  std::vector<int> dead;
  for (int peer = 0; peer < config_.size; ++peer) {
    if (peer == config_.rank || reached(peer, step)) {
      continue;
    }
    if (const auto gone = why_gone(peer)) {
      fail(ChannelError::Kind::PeerLost, *gone);
    }
    if (is_dead(peer)) {
      dead.push_back(peer);
    }
  }
  // A last look: the peer may have published just before it died.
  std::erase_if(dead, [&](int peer) { return reached(peer, step); });
  if (!dead.empty()) {
    fail(ChannelError::Kind::PeerLost, describe_death(dead));
  }
}

std::optional<ChannelError> Channel::why_hopeless(int peer) const {
  const Control& mine = control(config_.rank);
  if (mine.state.load(std::memory_order_acquire) == kFailed) {
    return ChannelError(
        ChannelError::Kind::Aborted,
        std::string("this group was given up: ") + mine.reason);
  }
  auto gone = why_gone(peer);
  if (!gone && is_dead(peer)) {
    gone = describe_death({&peer, 1});
  }
  return gone ? std::optional(ChannelError(ChannelError::Kind::PeerLost, *gone))
              : std::nullopt;
}

std::string Channel::time_is_up() const {
  char waited[48];
  std::snprintf(
      waited,
      sizeof waited,
      "timed out after %.1f s: ",
      std::chrono::duration<double>(config_.patience.timeout).count());
  return waited;
}

void Channel::throw_timeout(uint32_t step) {
  std::vector<int> missing;
  for (int peer = 0; peer < config_.size; ++peer) {
    if (!reached(peer, step)) {
      missing.push_back(peer);
    }
  }
  fail(
      ChannelError::Kind::Timeout,
      time_is_up() + name_of(missing) +
          " did not come. Alive but elsewhere: look for a branch that skips this call there, or raise the timeout if that rank is only slow.");
}

void Channel::fail(ChannelError::Kind kind, const std::string& reason) {
  dead_reason_ = reason;
  tell_peers(reason);
  throw ChannelError(kind, reason);
}

/// The first reason stays: abort() may come from another thread.
void Channel::tell_peers(const std::string& reason) {
  Control& mine = control(config_.rank);
  uint32_t expected = kActive;
  if (mine.state.compare_exchange_strong(expected, kFailing)) {
    mine.reason[reason.copy(mine.reason, sizeof mine.reason - 1)] = '\0';
    mine.state.store(kFailed, std::memory_order_release);
  }
  futex_wake_all(mine.published);
}

} // namespace tessera::comm::shm
