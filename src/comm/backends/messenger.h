// Messages of tensors over a wire, synchronous and asynchronous.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "comm/backends/carrier.h"
#include "comm/diagnostics/call.h"
#include "comm/shm/message.h"
#include "comm/shm/op_queue.h"

namespace tessera::comm {

/// Messages of one tag in one direction between this rank and a peer are a
/// lane: they follow each other in order, on a queue of their own. Lanes do not
/// wait for each other. A lane with asynchronous messages has a thread, so that
/// messages progress if nobody waits for them.
///
/// Thread safety: for the one thread that uses the group.
class Messenger {
 public:
  /// `names` are how errors call the ranks. The wire must outlive the
  /// messenger; before the messenger is destroyed, waits on the wire must have
  /// been made to end.
  /// `traces_calls` as in Capabilities.
  Messenger(
      shm::Wire& wire,
      int rank,
      std::vector<int> names,
      bool traces_calls);
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  /// Tensors of the CPU, contiguous, of call.bytes bytes.
  WorkPtr send(
      const Call& call,
      const at::Tensor& tensor,
      int to,
      int tag,
      bool async);
  WorkPtr receive(
      const Call& call,
      const at::Tensor& tensor,
      int from,
      int tag,
      bool async);

  /// Whether a message is under way.
  bool is_busy() const;

 private:
  enum class Direction { Out, In };
  using LaneKey = std::tuple<Direction, int, int>; // peer and tag

  shm::MessageRoute route_to(int peer, int tag) const;
  WorkPtr run(
      const Call& call,
      const LaneKey& key,
      bool async,
      c10d::OpType type,
      const at::Tensor& tensor,
      std::function<void()> operation);
  void drop_idle_lanes();

  // Constant after construction.
  shm::Wire& wire_;
  const int rank_;
  const std::vector<int> names_;
  const bool traces_calls_;

  // Works that are under way hold their lane too.
  std::map<LaneKey, std::shared_ptr<shm::OpQueue>> lanes_;
};

} // namespace tessera::comm
