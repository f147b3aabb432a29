#include "comm/backends/shm_backend.h"

#include <tessera/error.h>

#include <ATen/ops/from_blob.h>

#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/cores.h"
#include "base/mutex.h"
#include "comm/backends/done_work.h"
#include "comm/diagnostics/describe.h"
#include "comm/diagnostics/traced.h"
#include "comm/shm/reduce_kernels.h"

namespace tessera::comm {
namespace {

constexpr size_t kDefaultSlotBytes = 1 << 20;
constexpr std::chrono::microseconds kSpin{50};

constexpr Capabilities kCapabilities{
    .takes_every_dtype = true,
    .compares_calls = true,
    .traces_calls = true,
    .shares_memory = true};

/// An operation of the queue as c10d sees it.
class ShmWork : public c10d::Work {
 public:
  ShmWork(
      c10d::OpType type,
      std::vector<at::Tensor> outputs,
      std::shared_ptr<shm::OpQueue> queue)
      : Work(-1, type),
        outputs_(std::move(outputs)),
        queue_(std::move(queue)) {}

  void start(std::function<void()> operation) {
    // The task keeps this work alive until it is done.
    auto self = c10::intrusive_ptr<ShmWork>::reclaim_copy(this);
    task_ = queue_->submit(
        std::move(operation), [self = std::move(self)] { self->complete(); });
  }

  bool isCompleted() override {
    return task_->done();
  }
  bool isSuccess() const override {
    return task_->done() && !task_->error();
  }
  std::exception_ptr exception() const override {
    return task_->error();
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  bool wait(std::chrono::milliseconds) override {
    queue_->finish(task_);
    if (auto error = task_->error()) {
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    MutexLock lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()));
    }
    auto future = future_;
    lock.unlock();
    if (task_->done()) {
      complete();
    }
    return future;
  }

 private:
  void complete() {
    MutexLock lock(mutex_);
    auto future = future_;
    if (!future || std::exchange(future_completed_, true)) {
      return;
    }
    lock.unlock();
    if (auto error = task_->error()) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs_));
    }
  }

  // Constant after start().
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<shm::OpQueue> queue_;
  shm::OpQueue::TaskPtr task_;

  Mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ TESSERA_GUARDED_BY(mutex_);
  bool future_completed_ TESSERA_GUARDED_BY(mutex_) = false;
};

/// The bytes of a slot: whole pages, and a page at least for each rank.
size_t slot_bytes_setting(int num_ranks) {
  constexpr size_t kPage = 4096;
  const size_t least = static_cast<size_t>(num_ranks) * kPage;
  const char* text = std::getenv("TESSERA_SHM_SLOT_BYTES");
  if (text == nullptr || *text == '\0') {
    return std::max(kDefaultSlotBytes, least);
  }
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*end != '\0' || value < 4096 || value > (1ULL << 30)) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_SHM_SLOT_BYTES=\"{}\" is not a number of bytes from 4096 to 1073741824. Correct or unset it.",
            text));
  }
  return std::max(
      (static_cast<size_t>(value) + kPage - 1) / kPage * kPage, least);
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// For inputs: memory that is shared until somebody writes to it (async_save()
/// reads such memory) stays shared.
const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

shm::Reduction reduction_of(
    const at::Tensor& tensor,
    const c10d::ReduceOp& op) {
  const ReduceOp ours = [&] {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return ReduceOp::Sum;
      case c10d::ReduceOp::AVG:
        return ReduceOp::Avg;
      case c10d::ReduceOp::MIN:
        return ReduceOp::Min;
      case c10d::ReduceOp::MAX:
        return ReduceOp::Max;
      default:
        raise<c10::ValueError>(
            {.call = "shm backend"},
            "this reduction is not supported over shared memory; use SUM, AVG, MIN or MAX.");
    }
  }();
  const auto found = shm::find_reduction(tensor.scalar_type(), ours);
  if (!found) {
    raise<c10::ValueError>(
        {.call = "shm backend"},
        fmt::format(
            "{} of {} is not defined. Convert the tensor first.",
            name_of(ours),
            c10::toString(tensor.scalar_type())));
  }
  return *found;
}

/// A segment that all ranks map, as rank 0 announced it.
struct Shared {
  shm::Segment segment;
  std::string announcement; // rank 0's words, besides the place
  std::vector<std::string> answers; // each rank's process number
};

// How an answer begins that is not a process number.
constexpr char kFailed = '!'; // an error of the program or the user
constexpr char kCannot = '~'; // this host does not let memory be shared
/// In place of rank 0's segment. Rank 0's answer says why there is none.
constexpr std::string_view kNoSegment = "none";

/// The error of the first rank whose answer begins with `mark`, if any.
std::optional<std::string> find_problem(
    const std::vector<std::string>& answers,
    char mark,
    const std::vector<int>& names) {
  for (size_t peer = 0; peer < answers.size(); ++peer) {
    if (answers[peer].starts_with(mark)) {
      return fmt::format(
          "rank {} cannot share memory with its peers: {}",
          names[peer],
          answers[peer].substr(1));
    }
  }
  return std::nullopt;
}

/// Maps one segment on all ranks. Rank 0 makes the segment; `announce` gives
/// its size and some words for the other ranks. What went wrong on any rank is
/// thrown on all: CannotShareMemory if only the mapping failed.
Shared map_together(
    const BackendConfig& config,
    const std::string& key,
    const std::function<std::pair<size_t, std::string>()>& announce) {
  Shared shared;
  std::string answer = std::to_string(getpid());
  try {
    if (config.rank == 0) {
      const auto [bytes, words] = announce();
      shared.segment = shm::Segment::create(bytes);
      shared.announcement = words;
      config.store->set(
          key, shared.segment.locator().to_string() + "/" + words);
    } else {
      config.store->wait({key}, config.timeout);
      const std::string text = config.store->get_to_str(key);
      if (text != kNoSegment) {
        const size_t slash = text.find('/');
        shared.segment = shm::Segment::open(
            shm::SegmentLocator::parse(text.substr(0, slash)));
        shared.announcement = text.substr(slash + 1);
      }
    }
  } catch (const std::system_error& caught) { // from the segment
    answer = kCannot + std::string(caught.what());
  } catch (const std::exception& caught) {
    answer = kFailed + std::string(caught.what());
  }
  if (config.rank == 0 && shared.segment.data() == nullptr) {
    config.store->set(key, std::string(kNoSegment)); // peers stop waiting
  }
  shared.answers = exchange(
      *config.store,
      key + "/mapped",
      config.rank,
      config.global_ranks,
      answer,
      config.timeout,
      config.call);
  const ErrorSite site{
      .call = config.call,
      .rank = config.global_ranks[static_cast<size_t>(config.rank)]};
  if (auto text = find_problem(shared.answers, kFailed, config.global_ranks)) {
    raise<c10::DistBackendError>(site, *text);
  }
  if (auto text = find_problem(shared.answers, kCannot, config.global_ranks)) {
    raise<CannotShareMemory>(
        site,
        *text +
            ". The backend \"gloo\" (TESSERA_BACKEND=gloo) needs no shared memory.");
  }
  shared.segment.close_descriptor();
  return shared;
}

using Spans = shm::Collectives::Spans;

/// One span per rank. Splits are rows of dim 0; without any the parts are
/// equal.
std::vector<Spans> spans_of(
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int num_ranks) {
  const auto ranks = static_cast<size_t>(num_ranks);
  const size_t row = tensor.numel() == 0
      ? 0
      : tensor.nbytes() / static_cast<size_t>(tensor.size(0));
  std::vector<Spans> result(ranks);
  std::byte* next = bytes_of(tensor);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t bytes = splits.empty()
        ? tensor.nbytes() / ranks
        : static_cast<size_t>(splits[rank]) * row;
    result[rank].push_back({next, bytes});
    next += bytes;
  }
  return result;
}

std::vector<Spans> spans_of(
    const std::vector<std::vector<at::Tensor>>& pieces) {
  std::vector<Spans> result;
  for (const auto& tensors : pieces) {
    result.emplace_back();
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() != 0) {
        result.back().push_back({bytes_of(tensor), tensor.nbytes()});
      }
    }
  }
  return result;
}

void require_contiguous(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    raise<c10::ValueError>(
        {.call = "shm backend"},
        "tensors must be contiguous. Pass tensor.contiguous().");
  }
}

} // namespace

ShmBackend::ShmBackend(const BackendConfig& config)
    : Backend(config.rank, config.size()),
      Carrier(kCapabilities),
      config_(config),
      buffers_(std::make_shared<shm::SharedBuffers>()) {
  // Rank 0's setting is everybody's.
  Shared shared = map_together(config, "shm", [&config] {
    const size_t bytes = slot_bytes_setting(config.size());
    return std::pair(
        shm::Channel::bytes_needed(config.size(), bytes),
        std::to_string(bytes));
  });
  segment_ = std::move(shared.segment);
  const size_t slot_bytes = std::stoull(shared.announcement);
  std::vector<pid_t> pids;
  for (const std::string& answer : shared.answers) {
    pids.push_back(std::stoi(answer));
  }
  peers_ = std::make_unique<shm::Peers>(pids);
  const bool cores_are_short = config.ranks_on_host > host_cores();
  channel_ = std::make_unique<shm::Channel>(
      segment_.data(),
      shm::Channel::Config{
          .rank = config.rank,
          .size = config.size(),
          .names = config.global_ranks,
          .slot_bytes = slot_bytes,
          .timeout = config.timeout,
          .spin = cores_are_short ? std::chrono::microseconds{0} : kSpin,
          .is_alive = [this](int peer) { return peers_->is_alive(peer); }});
  collectives_ = std::make_unique<shm::Collectives>(
      *channel_, [buffers = buffers_](uint64_t id, uint64_t offset) {
        return buffers->at(id, offset);
      });
  queue_ = std::make_shared<shm::OpQueue>();
}

ShmBackend::~ShmBackend() {
  channel_->abort(
      "its process dropped the group while an operation was waiting");
  queue_->stop();
}

void ShmBackend::abort() {
  give_up("an operation of the group failed there");
}

void ShmBackend::give_up(const std::string& reason) {
  channel_->abort(reason);
  if (gloo_) {
    gloo_->abort();
  }
}

BackendPtr ShmBackend::backend() {
  return BackendPtr::reclaim_copy(this);
}

at::Tensor ShmBackend::allocate_shared(
    at::IntArrayRef sizes,
    at::ScalarType dtype) {
  const uint64_t id = ++num_allocations_;
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
      c10::elementSize(dtype);
  BackendConfig config = config_;
  config.call = "allocate_shared";
  Shared shared = map_together(config, "shared/" + std::to_string(id), [bytes] {
    return std::pair(std::max<size_t>(bytes, 1), std::string());
  });
  auto buffer = buffers_->add(id, std::move(shared.segment));
  std::byte* data = buffer->data();
  return at::from_blob(
      data, sizes, [buffer](void*) {}, at::TensorOptions().dtype(dtype));
}

WorkPtr ShmBackend::run(
    const Call& call,
    c10d::OpType type,
    bool async,
    Tensors outputs,
    std::function<void()> operation) {
  if (at::hasCallbacks()) { // there may be a profiler
    operation = [operation = std::move(operation), name = trace_name(call)] {
      const TracedRange range([&] { return name; });
      operation();
    };
  }
  if (!async) {
    queue_->run_now(operation);
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }
  auto work = c10::make_intrusive<ShmWork>(type, std::move(outputs), queue_);
  work->start(std::move(operation));
  return work;
}

Call ShmBackend::make_call(const char* operation, const at::Tensor& input) {
  Call call = describe_call(operation, input);
  call.sequence = sequence_++;
  return call;
}

Call ShmBackend::with_shared_input(Call call, const at::Tensor& input) const {
  if (auto place = buffers_->find(input.const_data_ptr(), input.nbytes())) {
    call.segment = place->id;
    call.offset = place->offset;
  }
  return call;
}

c10d::Backend& ShmBackend::gloo() {
  if (!gloo_) {
    gloo_ = make_gloo_backend(config_)->backend();
  }
  return *gloo_;
}

/// Gloo, after one step of the channel, which compares the ranks' calls as Gloo
/// does not.
c10d::Backend& ShmBackend::gloo_for(const char* operation) {
  queue_->run_now(
      [this, call = make_call(operation)] { collectives_->barrier(call); });
  return gloo();
}

WorkPtr ShmBackend::broadcast(
    const Call& call,
    at::Tensor tensor,
    int root,
    bool async) {
  require_contiguous(tensor);
  return run(
      call,
      c10d::OpType::BROADCAST,
      async,
      {tensor},
      [this, call, tensor, root] {
        collectives_->broadcast(call, bytes_of(tensor), tensor.nbytes(), root);
      });
}

WorkPtr ShmBackend::all_reduce(
    const Call& call,
    at::Tensor tensor,
    const c10d::ReduceOp& op,
    bool async) {
  require_contiguous(tensor);
  return run(
      call,
      c10d::OpType::ALLREDUCE,
      async,
      {tensor},
      [this, call, tensor, reduction = reduction_of(tensor, op)] {
        collectives_->all_reduce(
            call, bytes_of(tensor), tensor.nbytes(), reduction);
      });
}

WorkPtr ShmBackend::all_gather(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    bool async) {
  require_contiguous(input);
  require_contiguous(output);
  return run(
      call,
      c10d::OpType::_ALLGATHER_BASE,
      async,
      {output},
      [this, output, input, call = with_shared_input(call, input)] {
        collectives_->all_gather(
            call, const_bytes_of(input), bytes_of(output), input.nbytes());
      });
}

WorkPtr ShmBackend::reduce_scatter(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    const c10d::ReduceOp& op,
    bool async) {
  require_contiguous(input);
  require_contiguous(output);
  return run(
      call,
      c10d::OpType::_REDUCE_SCATTER_BASE,
      async,
      {output},
      [this,
       output,
       input,
       call = with_shared_input(call, input),
       reduction = reduction_of(input, op)] {
        collectives_->reduce_scatter(
            call,
            bytes_of(input),
            bytes_of(output),
            output.nbytes(),
            reduction);
      });
}

WorkPtr ShmBackend::barrier(const Call& call, bool async) {
  return run(call, c10d::OpType::BARRIER, async, {}, [this, call] {
    collectives_->barrier(call);
  });
}

WorkPtr ShmBackend::all_to_all(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    std::vector<int64_t> output_splits,
    std::vector<int64_t> input_splits,
    bool async) {
  require_contiguous(output);
  require_contiguous(input);
  return run(
      call,
      c10d::OpType::ALLTOALL_BASE,
      async,
      {output},
      [this,
       call,
       input, // kept until the operation ran
       from = spans_of(input, input_splits, getSize()),
       to = spans_of(output, output_splits, getSize())] {
        collectives_->all_to_all(call, from, to);
      });
}

WorkPtr ShmBackend::all_to_all_pieces(
    const Call& call,
    const std::vector<Tensors>& outputs,
    const std::vector<Tensors>& inputs) {
  return run(call, c10d::OpType::ALLTOALL, /*async=*/false, {}, [&] {
    collectives_->all_to_all(call, spans_of(inputs), spans_of(outputs));
  });
}

WorkPtr ShmBackend::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& options) {
  return broadcast(
      make_call("broadcast", tensors.at(0)),
      tensors.at(0),
      static_cast<int>(options.rootRank),
      options.asyncOp);
}

WorkPtr ShmBackend::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& options) {
  return all_reduce(
      make_call("all_reduce", tensors.at(0)),
      tensors.at(0),
      options.reduceOp,
      options.asyncOp);
}

WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& options) {
  WorkPtr last = c10::make_intrusive<DoneWork>(c10d::OpType::ALLREDUCE);
  for (at::Tensor& tensor : tensors) {
    Tensors one{tensor};
    last = allreduce(one, options);
  }
  return last; // operations finish in order
}

WorkPtr ShmBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return all_gather(
      make_call("all_gather_into", input), output, input, options.asyncOp);
}

WorkPtr ShmBackend::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  const at::Tensor input = inputs.at(0).contiguous();
  const Tensors parts = outputs.at(0);
  at::Tensor flat = at::empty({getSize(), input.numel()}, input.options());
  const Call call = make_call("all_gather", input);
  return run(
      call,
      c10d::OpType::ALLGATHER,
      options.asyncOp,
      parts,
      [this, call, flat, input, parts] {
        collectives_->all_gather(
            call, const_bytes_of(input), bytes_of(flat), input.nbytes());
        for (size_t i = 0; i < parts.size(); ++i) {
          const at::Tensor part = flat[static_cast<int64_t>(i)];
          parts[i].copy_(part.view_as(parts[i]));
        }
      });
}

WorkPtr ShmBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return reduce_scatter(
      make_call("reduce_scatter", input),
      output,
      input,
      options.reduceOp,
      options.asyncOp);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return barrier(make_call("barrier"), options.asyncOp);
}

WorkPtr ShmBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  return all_to_all(
      make_call("all_to_all"),
      output,
      input,
      output_splits,
      input_splits,
      options.asyncOp);
}

WorkPtr ShmBackend::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& options) {
  return gloo_for("all_to_all").alltoall(outputs, inputs, options);
}

WorkPtr ShmBackend::reduce(
    Tensors& tensors,
    const c10d::ReduceOptions& options) {
  return gloo_for("reduce").reduce(tensors, options);
}

WorkPtr ShmBackend::gather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& options) {
  return gloo_for("gather").gather(outputs, inputs, options);
}

WorkPtr ShmBackend::scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& options) {
  return gloo_for("scatter").scatter(outputs, inputs, options);
}

WorkPtr ShmBackend::reduce_scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& options) {
  return gloo_for("reduce_scatter").reduce_scatter(outputs, inputs, options);
}

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  return gloo().send(tensors, to, tag);
}

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return gloo().recv(tensors, from, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return gloo().recvAnysource(tensors, tag);
}

CarrierPtr make_shm_backend(const BackendConfig& config) {
  auto backend = c10::make_intrusive<ShmBackend>(config);
  Carrier* carrier = backend.get();
  // c10d holds the same object, and counts who does.
  return CarrierPtr(carrier, [backend = std::move(backend)](Carrier*) {});
}

} // namespace tessera::comm
