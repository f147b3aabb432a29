// A reducer's part of a step that is captured.
#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <utility>

#include "ddp/reducer.h"

namespace tessera::ddp {

libtorch::HostPart Reducer::host_part() {
  return {
      .owner = this,
      .lives = [life = std::weak_ptr(life_)] { return !life.expired(); },
      .objection = [this]() -> std::string {
        if (hook_) {
          return "a communication hook of a DistributedDataParallel runs on the host. Leave it out.";
        }
        if (moves_data() && !buckets_.has_memory()) {
          return "the buckets of a DistributedDataParallel have no memory yet. Run an eager step first.";
        }
        return "";
      },
      .settings =
          [this] {
            return fmt::format(
                "{} {} {}", syncs_, has_hook(), buckets_.num_moves());
          },
      .forget =
          [this,
           used = was_used_,
           forwards = num_forwards_,
           steps = averaged_.steps(),
           syncs = syncs_] {
            const std::scoped_lock lock(mutex_);
            reset();
            was_used_ = used;
            num_forwards_ = forwards;
            set_sync(syncs);
            averaged_.set_steps(steps);
          },
      .finish = [this] { return effect_of_replays(); }};
}

/// The graph writes to the buckets that exist now, even if others replace them
/// later. After a step that reduces, counts are as after the step that was
/// recorded.
std::function<void()> Reducer::effect_of_replays() {
  if (num_forwards_ > 0) {
    raise(
        {.call = "DistributedDataParallel"},
        "the captured step makes a forward through the handle whose gradients it does not reduce. Call backward() in the step, or evaluate under torch::NoGradGuard.");
  }
  std::vector<at::Tensor> kept;
  for_each_bucket([&](const at::Tensor& flat) { kept.push_back(flat); });
  return [this,
          kept = std::move(kept),
          used = was_used_,
          steps = averaged_.steps()] {
    const std::scoped_lock lock(mutex_);
    was_used_ = used;
    num_forwards_ = 0;
    averaged_.set_steps(steps);
  };
}

} // namespace tessera::ddp
