#include <utility>

#include "comm/diagnostics/current_call.h"
#include "comm/diagnostics/describe_call.h"
#include "comm/diagnostics/traced.h"
#include "comm/diagnostics/watched_wait.h"
#include "comm/group/group_impl.h"
#include "libtorch/recording.h"

namespace tessera::comm {

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
      is_recorded_(libtorch::is_recorded_here()),
      work_(std::move(work)),
      finish_(std::move(finish)) {}

void PendingCall::wait() {
  if (!work_) {
    return;
  }
  const auto work = std::exchange(work_, nullptr);
  const auto finish = std::exchange(finish_, nullptr);
  if (is_recorded_ && !libtorch::is_recorded_here()) {
    return; // the recording has failed: there is nothing to wait for
  }
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
    if (is_recorded_ || libtorch::is_recorded_here()) {
      throw; // the recording has failed, not the group
    }
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
