#include "comm/backends/messenger.h"

#include <algorithm>
#include <utility>

#include "comm/backends/done_work.h"
#include "comm/backends/queued_work.h"
#include "comm/backends/shm_tensors.h"
#include "comm/diagnostics/traced.h"

namespace tessera::comm {

Messenger::Messenger(
    shm::Wire& wire,
    int rank,
    std::vector<int> names,
    bool traces_calls)
    : wire_(wire),
      rank_(rank),
      names_(std::move(names)),
      traces_calls_(traces_calls) {}

Messenger::~Messenger() {
  // Works that were handed out may keep a lane: its thread must not use the
  // wire any longer.
  for (const auto& [key, lane] : lanes_) {
    lane->stop();
  }
}

shm::MessageRoute Messenger::route_to(int peer, int tag) const {
  return {
      .peer = peer,
      .tag = tag,
      .own_name = names_[static_cast<size_t>(rank_)],
      .peer_name = names_[static_cast<size_t>(peer)]};
}

WorkPtr Messenger::send(
    const Call& call,
    const at::Tensor& tensor,
    int to,
    int tag,
    bool async) {
  return run(
      call,
      {Direction::Out, to, tag},
      async,
      c10d::OpType::SEND,
      tensor,
      [this, call, tensor, route = route_to(to, tag)] {
        shm::send_message(wire_, call, route, const_bytes_of(tensor));
      });
}

WorkPtr Messenger::receive(
    const Call& call,
    const at::Tensor& tensor,
    int from,
    int tag,
    bool async) {
  return run(
      call,
      {Direction::In, from, tag},
      async,
      c10d::OpType::RECV,
      tensor,
      [this, call, tensor, route = route_to(from, tag)] {
        shm::receive_message(wire_, call, route, bytes_of(tensor));
      });
}

WorkPtr Messenger::run(
    const Call& call,
    const LaneKey& key,
    bool async,
    c10d::OpType type,
    const at::Tensor& tensor,
    std::function<void()> operation) {
  drop_idle_lanes();
  if (traces_calls_) {
    operation = traced(call, std::move(operation));
  }
  auto& lane = lanes_[key];
  if (!lane) {
    lane = std::make_shared<shm::OpQueue>();
  }
  if (!async) {
    lane->run_now(operation);
    return c10::make_intrusive<DoneWork>(type, std::vector{tensor});
  }
  auto work = c10::make_intrusive<QueuedWork>(type, std::vector{tensor}, lane);
  work->start(std::move(operation));
  return work;
}

bool Messenger::is_busy() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& entry) {
    return !entry.second->is_idle();
  });
}

/// A program may use as many tags as it likes. A lane is dropped here, on the
/// thread of the group, and never by the lane's own thread.
void Messenger::drop_idle_lanes() {
  std::erase_if(
      lanes_, [](const auto& entry) { return entry.second.use_count() == 1; });
}

} // namespace tessera::comm
