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
#include <utility>

#include "base/fnv.h"
#include "comm/backends/done_work.h"
#include "comm/diagnostics/current_call.h"
#include "comm/diagnostics/describe_call.h"
#include "comm/diagnostics/observer.h"
#include "comm/diagnostics/traced.h"
#include "comm/diagnostics/watched_wait.h"
#include "comm/group/staging.h"
#include "libtorch/recording.h"

namespace tessera::comm {
namespace {

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
      .fake_wire = world_->fake_wire,
      .call = size() == world_->size() ? "init" : "split"};
  cpu_ = make_cpu_carrier(config);
  process_group_ =
      c10::make_intrusive<c10d::ProcessGroup>(store_, rank_, size());
  process_group_->setBackend(
      c10::DeviceType::CPU, cpu_->can.c10d_type, cpu_->backend());
  process_group_->setDefaultBackend(cpu_->can.c10d_type);
  if (world_->backend == BackendChoice::Fake) {
    cuda_ =
        make_fake_backend(config, c10::kCUDA); // asks no GPU before it is used
  } else if (world_->use_nccl) {
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
  const BackendChoice wanted = world_->backend;
  if (wanted == BackendChoice::Fake) {
    return make_fake_backend(config, c10::kCPU);
  }
  const bool can_share = on_one_host(*world_, global_ranks_);
  if (wanted == BackendChoice::Shm && !can_share) {
    raise_error<c10::ValueError>(
        "init",
        "the backend \"shm\" was asked for, but the ranks of this group are on several hosts, or on one in different containers, namespaces or accounts. Use \"auto\", which takes Gloo there.");
  }
  if (wanted != BackendChoice::Gloo && can_share) {
    try {
      return make_shm_backend(config);
    } catch (const CannotShareMemory& error) { // on all ranks
      if (wanted == BackendChoice::Shm) {
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
  const auto device =
      input.defined() ? input.device().type() : c10::DeviceType::CPU;
  const bool is_on_cuda = cuda_ && device != c10::DeviceType::CPU;
  // A rank with a tensor of the CPU would wait in another backend.
  Call call = is_on_cuda
      ? describe_call(
            request.operation,
            input,
            std::string(request.suffix) + " on CUDA",
            request.label)
      : describe_call(request.operation, input, request.suffix, request.label);
  const CarrierPtr& carrier = this->carrier(device);
  const bool compares = (world_->compare_calls || request.always_compared) &&
      !carrier->can.compares_calls;
  if (compares) {
    libtorch::refuse_in_recording(
        request.operation,
        request.always_compared
            ? "The ranks compare this call on the host: make it outside the captured step."
            : "Unset TESSERA_CHECK, which compares calls on the host.");
  }
  if (libtorch::is_recorded_here()) {
    libtorch::count_in_recording(mix_digest(call.digest, call.bytes));
  }
  uint64_t& sequence = is_on_cuda ? cuda_sequence_ : sequence_;
  if (auto noted = note(call, sequence, carrier, start, finish)) {
    return *std::move(noted);
  }
  // A rank may fail half-way through what others record to the end.
  call.sequence = libtorch::is_recorded_here() ? sequence : sequence++;
  if (!is_on_cuda && !carrier->can.compares_calls) {
    recent_.note(call);
  }
  return begin(
      call,
      request.async,
      compares ? Compared::Yes : Compared::No,
      carrier,
      start,
      std::move(finish));
}

Work GroupImpl::launch_message(
    Call call,
    bool async,
    const Start& start,
    std::function<void()> finish) {
  if (auto noted = note(call, num_messages_, cpu_, start, finish)) {
    return *std::move(noted);
  }
  call.sequence = num_messages_++;
  return begin(call, async, Compared::No, cpu_, start, std::move(finish));
}

std::optional<Work> GroupImpl::note(
    const Call& call,
    uint64_t& sequence,
    const CarrierPtr& carrier,
    const Start& start,
    std::function<void()>& finish) {
  if (carrier == cuda_ || !libtorch::is_recorded_here()) {
    return std::nullopt;
  }
  require_alive(call);
  libtorch::note_in_recording(
      call.operation,
      kOverNcclOnly,
      [self = shared_from_this(),
       again = call,
       &sequence,
       carrier,
       start]() mutable {
        again.sequence = sequence++;
        start(*carrier, again, /*async=*/false)->wait();
      });
  return Work(std::make_shared<Work::Pending>(
      shared_from_this(),
      call,
      c10::make_intrusive<DoneWork>(c10d::OpType::UNKNOWN),
      /*on_host=*/true,
      std::move(finish),
      /*watched_as=*/0));
}

void GroupImpl::require_alive(const Call& call) const {
  if (!dead_reason_.empty()) {
    raise_error<PeerLostError>(
        call.operation,
        "this group failed earlier and cannot be used again: " + dead_reason_ +
            " Start again, or shut down and call init() on every rank.");
  }
}

Work GroupImpl::begin(
    const Call& call,
    bool async,
    Compared compared,
    const CarrierPtr& carrier,
    const Start& start,
    std::function<void()> finish) {
  require_alive(call);
  const bool on_host = carrier != cuda_;
  note_call_begins(call, name_.c_str());
  // A call that is recorded has not been made yet; and to tell of its end on
  // NCCL's future would bring another stream into the recording.
  const uint64_t id = libtorch::is_recorded_here() ? 0 : next_watched_call();
  tell({CallEvent::Kind::Starts, id, call, !on_host});
  WorkPtr work;
  try {
    std::optional<TracedRange> range;
    if (!carrier->can.traces_calls) {
      range.emplace([&] { return trace_name(call); });
    }
    const WatchedWait waiting(async ? 0 : id, call, !on_host);
    if (compared == Compared::Yes) {
      compare_calls(call);
    }
    work = start(*carrier, call, async);
    if (async) {
      note_call_ends(); // begins again in wait()
    }
  } catch (...) {
    note_call_ends();
    if (libtorch::is_recorded_here()) {
      throw; // the recording has failed, not the group
    }
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
    recent_.forget(call);
    raise_error<DisagreementError>(call.operation, *text);
  }
}

} // namespace tessera::comm
