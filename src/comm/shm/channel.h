// The step protocol that shared-memory collectives are made of.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/diagnostics/call.h"
#include "comm/shm/futex.h"
#include "comm/shm/waiting.h"

namespace tessera::comm::shm {

/// Why a step could not be made. The text names the ranks concerned.
class ChannelError : public std::runtime_error {
 public:
  enum class Kind {
    Timeout, // a peer did not come in time; the channel is dead
    PeerLost, // a peer died, left or failed; the channel is dead
    Mismatch, // ranks made different calls; the channel stays usable
    Aborted, // this rank gave the channel up itself
  };

  ChannelError(Kind kind, const std::string& what)
      : std::runtime_error(what), kind_(kind) {}

  Kind kind() const {
    return kind_;
  }

 private:
  Kind kind_;
};

/// [Note: shared-memory steps]
///
/// Ranks move in steps, numbered from 1. In step k each rank may write its own
/// slot, publishes k, and reads the slots of peers that have published k. Each
/// rank has two slots, used in turn, so one wait per step is enough:
///
///   1. A rank makes its steps in order. A peer that has published k-1 has
///      therefore finished reading everything of step k-2.
///   2. begin_step() for k waits until all peers have published k-1. By (1)
///      nobody reads slot k%2 any longer, which step k-2 filled: the slot may
///      be overwritten.
///   3. `published` is stored with release and loaded with acquire order: who
///      sees k sees the slot of step k.
///
/// Each rank has one futex word, its own `published`: a waiter knows which
/// rank it waits for, so a timeout can name it.
///
/// A waiting rank (wait_until() in waiting.h) checks now and then whether a
/// peer has died, left or failed.
///
/// Thread safety: one thread at a time makes steps. Constant functions, but for
/// call_of() and check_calls(), and abort() may be called by any thread.
class Channel {
 public:
  struct Config {
    int rank = 0;
    int size = 1;
    /// How messages call the ranks; empty: by their number here.
    std::vector<int> names;
    size_t slot_bytes = 0;
    Patience patience;
    /// False once the peer's process is gone. Empty: peers never die.
    std::function<bool(int peer)> is_alive;
  };

  /// Bytes of shared memory that a channel of `size` ranks needs.
  static size_t bytes_needed(int size, size_t slot_bytes);

  /// `base` is memory of bytes_needed(), zero-filled before the first rank's
  /// constructor, aligned to a page, and outlives the channel.
  Channel(std::byte* base, Config config);

  /// Tells the peers that this rank has left.
  ~Channel();

  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const {
    return config_.rank;
  }
  int size() const {
    return config_.size;
  }
  size_t slot_bytes() const {
    return config_.slot_bytes;
  }
  const Patience& patience() const {
    return config_.patience;
  }
  /// "ranks 1, 3", as messages call them.
  std::string name_of(std::span<const int> peers) const;
  /// How the text of a timeout begins.
  std::string time_is_up() const;
  /// Why `peer` need not be waited for any longer: this rank has given the
  /// channel up, or the peer has died, left or failed. Nothing while there is
  /// hope.
  std::optional<ChannelError> why_hopeless(int peer) const;

  /// Opens the next step; returns this rank's slot, free to be written.
  std::byte* begin_step();
  /// Makes slot and call of this step visible to the peers.
  void publish(const Call* call = nullptr);
  /// Waits until `peer` has published this step; returns its slot.
  const std::byte* wait_for(int peer);
  void wait_for_all();
  /// The call that `peer` published with this step. After wait_for(peer).
  const Call& call_of(int peer) const;
  /// Throws Mismatch on every rank unless all published matching calls with
  /// this step. After wait_for_all().
  void check_calls() const;

  /// Gives the channel up and throws Aborted: something only this rank can see
  /// is wrong.
  [[noreturn]] void give_up(const std::string& reason);
  /// Gives the channel up from another thread: waits of this rank that are not
  /// satisfied throw Aborted, and peers that wait for it learn `reason` at
  /// once.
  void abort(const std::string& reason);

 private:
  struct Control;

  Control& control(int rank) const;
  std::byte* slot(int rank) const;
  bool reached(int peer, uint32_t step) const;
  std::optional<std::string> why_gone(int peer) const;
  bool is_dead(int peer) const;
  std::string describe_death(std::span<const int> peers) const;
  void wait_published(int peer, uint32_t step);
  void throw_if_hopeless(uint32_t step);
  [[noreturn]] void throw_timeout(uint32_t step);
  [[noreturn]] void fail(ChannelError::Kind kind, const std::string& reason);
  void tell_peers(const std::string& reason);

  // Constant after construction.
  std::byte* const base_;
  const Config config_;

  // Touched by the one thread that makes steps.
  uint32_t step_ = 0;
  std::string dead_reason_; // not empty: the channel is dead

  // Provides its own synchronization.
  std::atomic<bool> aborted_{false};
};

} // namespace tessera::comm::shm
