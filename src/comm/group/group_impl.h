// The implementation behind a Group handle.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <unistd.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/backend_choice.h"
#include "comm/backends/backends.h"
#include "comm/diagnostics/call.h"
#include "comm/diagnostics/recent_calls.h"

namespace tessera::comm {

/// What all groups of one world have in common.
struct WorldInfo {
  int rank = 0;
  int local_rank = 0;
  std::vector<int> host_of; // by global rank: a number for each host
  std::string address; // this host's, numeric, as the peers reach it
  BackendChoice backend = BackendChoice::Auto; // by InitOptions
  WireSpeed fake_wire; // by InitOptions
  bool use_nccl = false;
  bool compare_calls = false; // TESSERA_CHECK=1
  Milliseconds timeout{0};

  int size() const {
    return static_cast<int>(host_of.size());
  }
};

/// A group's backends and its bookkeeping. Collectives that every backend
/// needs go through here, so that checks, call comparison, staging of CUDA
/// tensors and errors are the same for all.
class GroupImpl : public std::enable_shared_from_this<GroupImpl> {
 public:
  /// Collective over `global_ranks`; `store` belongs to this group alone.
  GroupImpl(
      std::shared_ptr<const WorldInfo> world,
      StorePtr store,
      std::string name,
      std::vector<int> global_ranks);
  ~GroupImpl();

  int rank() const {
    return rank_;
  }
  int size() const {
    return static_cast<int>(global_ranks_.size());
  }
  const std::string& name() const {
    return name_;
  }
  const std::vector<int>& global_ranks() const {
    return global_ranks_;
  }
  const WorldInfo& world() const {
    return *world_;
  }
  const std::shared_ptr<const WorldInfo>& world_ptr() const {
    return world_;
  }
  const StorePtr& store() const {
    return store_;
  }
  /// The c10d process group, registered with c10d by its group name. Null in a
  /// group of one.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return process_group_;
  }
  /// What carries tensors of `device`; the CPU's carrier where the device has
  /// none. Null in a group of one.
  const CarrierPtr& carrier(c10::DeviceType device) const {
    return device == c10::DeviceType::CUDA && cuda_ ? cuda_ : cpu_;
  }

  /// How an operation is to be run.
  struct Request {
    const char* operation = "";
    std::string_view label;
    std::string_view suffix; // of the description: "SUM", "root 2"
    bool async = false;
    /// The ranks compare this call over every backend, not only where they
    /// were asked to.
    bool always_compared = false;
  };
  /// Starts the operation that `call` describes. `async` is c10d's asyncOp.
  using Start =
      std::function<WorkPtr(Carrier& carrier, const Call& call, bool async)>;

  /// Compares calls if asked to, starts the operation, translates errors.
  /// `input` describes the operation and chooses the carrier. `finish` runs
  /// once, after the operation, in wait().
  Work launch(
      const Request& request,
      const at::Tensor& input,
      const Start& start,
      std::function<void()> finish);

  /// The same for a message to or from one peer. The ranks do not count it
  /// among their calls, and nobody but the two compares it. `call.sequence` is
  /// set here. The CPU's carrier takes it.
  Work launch_message(
      Call call,
      bool async,
      const Start& start,
      std::function<void()> finish);

  /// Throws `error` as an error of `call`. The group is dead afterwards, unless
  /// only the arguments were at fault.
  [[noreturn]] void fail(const Call& call, std::exception_ptr error);

  /// For a rank that cannot go on with the collectives that its peers wait in:
  /// those fail at once, on this rank and on the peers, and the group is dead.
  /// Peers throw a PeerLostError with this rank and the reason.
  void give_up(const std::string& reason);

  /// For a rank that refuses to begin a step that its peers may have begun, and
  /// that made no collective of this step yet. Returns true if all ranks refuse
  /// the step within some seconds: the group is as before. Otherwise gives the
  /// group up, and returns false. `step` names the step, alike on all ranks.
  bool refuse(const std::string& step, const std::string& reason);

  /// Blocks until `work` is done. Checks now and then whether a peer has given
  /// the group up, which a backend notices only on the connections that it
  /// waits on, and whether the ranks make different calls; see
  /// [Note: long waits].
  void wait_for(c10d::Work& work) const;

  /// `[call] rank 2/8, group "mesh.dp": what`.
  template <class E = c10::Error>
  [[noreturn]] void raise_error(std::string_view call, std::string_view what)
      const;

  /// The number of groups that were split off, for the prefixes of their
  /// stores. The same on all ranks, since splitting is collective.
  int next_split() {
    return num_splits_++;
  }

 private:
  enum class Compared { No, Yes };

  CarrierPtr make_cpu_carrier(const BackendConfig& config) const;
  void require_alive(const Call& call) const;
  /// In a step that is recorded, notes the call in place of making it: each
  /// replay makes the call. See libtorch::note_in_recording().
  std::optional<Work> note(
      const Call& call,
      uint64_t& sequence,
      const CarrierPtr& carrier,
      const Start& start,
      std::function<void()>& finish);
  Work begin(
      const Call& call,
      bool async,
      Compared compared,
      const CarrierPtr& carrier,
      const Start& start,
      std::function<void()> finish);
  /// For the copy of the group in a forked child, which is not a rank. The
  /// carriers of the copy share memory and sockets with the rank's and have no
  /// threads, so they are never destroyed.
  void leave_to_owner();
  void compare_calls(const Call& call);
  std::vector<int> find_missing(const Call& call);
  /// Returns once the peers that are in an operation have read why a rank gave
  /// up, or after some seconds: this process may host the store they read from.
  void wait_for_readers(const Call& call);
  /// Ends the waits of peers in wait_for(). Returns the reason that the first
  /// rank to fail gave.
  std::string announce_failure(const std::string& reason) const;
  /// An operation failed, so the group is dead, unless it is already. Peers
  /// that share no memory with this rank are told; if another rank failed
  /// first, its reason becomes the group's.
  void die(const Call& call, const std::string& reason);

  // Constant after construction.
  const pid_t owner_ = getpid();
  const std::shared_ptr<const WorldInfo> world_;
  const StorePtr store_;
  const std::string name_;
  const std::vector<int> global_ranks_;
  int rank_ = 0;
  CarrierPtr cpu_;
  CarrierPtr cuda_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::string registered_name_;

  // Touched by the one thread that uses the group.
  // Both number collectives alike on all ranks. Collectives on CUDA tensors are
  // counted apart, since a rank whose capture fails leaves some of them out.
  uint64_t sequence_ = 0;
  uint64_t cuda_sequence_ = 0;
  uint64_t num_messages_ = 0;
  int num_splits_ = 0;
  int num_refused_ = 0; // steps; alike on all ranks that refused the same ones
  RecentCalls recent_; // by sequence_, where the backend compares none
  std::string dead_reason_; // not empty: the group is dead
};

/// An operation that has been started.
class PendingCall {
 public:
  PendingCall(
      std::shared_ptr<GroupImpl> group,
      const Call& call,
      WorkPtr work,
      bool on_host,
      std::function<void()> finish,
      uint64_t watched_as);

  void wait();
  bool done();

 private:
  // Constant after construction.
  const std::shared_ptr<GroupImpl> group_;
  const Call call_;
  const bool on_host_; // else waiting only orders the device's stream
  const uint64_t watched_as_; // see next_watched_call()
  const bool is_recorded_; // and not made, see libtorch/recording.h

  // Touched by the one thread that uses the group. Dropped by wait().
  WorkPtr work_;
  std::function<void()> finish_;
};

template <class E>
void GroupImpl::raise_error(std::string_view call, std::string_view what)
    const {
  const bool is_world = size() == world_->size();
  raise<E>(
      {.call = call,
       .rank = world_->rank,
       .world_size = world_->size(),
       .group = is_world ? std::string_view{} : name_},
      what);
}

} // namespace tessera::comm

namespace tessera {

// By these names the public header knows them: it names no namespace of ours,
// so that programs may have namespaces of these names. Nobody makes a GroupImpl
// or a PendingCall that is not one of these.
class Group::Impl final : public comm::GroupImpl {
 public:
  using GroupImpl::GroupImpl;
};

class Work::Pending final : public comm::PendingCall {
 public:
  using PendingCall::PendingCall;
};

} // namespace tessera
