#include "comm/backends/shm_backend.h"

#include <tessera/error.h>

#include <ATen/ops/from_blob.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/cores.h"
#include "comm/backends/done_work.h"
#include "comm/backends/queued_work.h"
#include "comm/backends/shared_mapping.h"
#include "comm/backends/shm_tensors.h"
#include "comm/diagnostics/traced.h"

namespace tessera::comm {
namespace {

constexpr size_t kDefaultSlotBytes = 1 << 20;
constexpr std::chrono::microseconds kSpin{50};

constexpr Capabilities kCapabilities{
    .takes_every_dtype = true,
    .compares_calls = true,
    .traces_calls = true,
    .shares_memory = true};

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

} // namespace

ShmBackend::ShmBackend(const BackendConfig& config)
    : Backend(config.rank, config.size()),
      Carrier(kCapabilities),
      config_(config),
      buffers_(std::make_shared<shm::SharedBuffers>()) {
  // Rank 0's setting is everybody's.
  SharedMapping shared = map_together(config, "shm", [&config] {
    const size_t bytes = slot_bytes_setting(config.size());
    return std::pair(
        shm::Channel::bytes_needed(config.size(), bytes) +
            shm::Pipes::bytes_needed(config.size()),
        std::to_string(bytes));
  });
  segment_ = std::move(shared.segment);
  const size_t slot_bytes = std::stoull(shared.announcement);
  std::vector<pid_t> pids;
  for (const std::string& answer : shared.answers) {
    pids.push_back(std::stoi(answer));
  }
  peers_ = std::make_unique<shm::PeerProcesses>(pids);
  const bool cores_are_short = config.ranks_on_host > host_cores();
  channel_ = std::make_unique<shm::Channel>(
      segment_.data(),
      shm::Channel::Config{
          .rank = config.rank,
          .size = config.size(),
          .names = config.global_ranks,
          .slot_bytes = slot_bytes,
          .patience =
              {.spin = cores_are_short ? std::chrono::microseconds{0} : kSpin,
               .timeout = config.timeout},
          .is_alive = [this](int peer) { return peers_->is_alive(peer); }});
  collectives_ = std::make_unique<shm::Collectives>(
      *channel_, [buffers = buffers_](uint64_t id, uint64_t offset) {
        return buffers->at(id, offset);
      });
  pipes_ = std::make_unique<shm::Pipes>(
      segment_.data() + shm::Channel::bytes_needed(config.size(), slot_bytes),
      *channel_);
  messenger_ = std::make_unique<Messenger>(
      *pipes_, config.rank, config.global_ranks, /*traces_calls=*/true);
  queue_ = std::make_shared<shm::OpQueue>();
}

ShmBackend::~ShmBackend() {
  channel_->abort(
      "its process dropped the group while an operation was waiting");
  messenger_.reset();
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
  SharedMapping shared =
      map_together(config, "shared/" + std::to_string(id), [bytes] {
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
  operation = traced(call, std::move(operation));
  if (!async) {
    queue_->run_now(operation);
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }
  auto work = c10::make_intrusive<QueuedWork>(type, std::move(outputs), queue_);
  work->start(std::move(operation));
  return work;
}

Call ShmBackend::with_shared_input(Call call, const at::Tensor& input) const {
  if (auto place = buffers_->find(input.const_data_ptr(), input.nbytes())) {
    call.segment = place->id;
    call.offset = place->offset;
  }
  return call;
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

WorkPtr ShmBackend::gather(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    int root,
    bool async) {
  return run(
      call,
      c10d::OpType::GATHER,
      async,
      {output.defined() ? output : input},
      [this, call, output, input, root] {
        collectives_->gather(
            call,
            const_bytes_of(input),
            output.defined() ? bytes_of(output) : nullptr,
            input.nbytes(),
            root);
      });
}

WorkPtr ShmBackend::scatter(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    int root,
    bool async) {
  return run(
      call,
      c10d::OpType::SCATTER,
      async,
      {output},
      [this, call, output, input, root] {
        collectives_->scatter(
            call,
            input.defined() ? const_bytes_of(input) : nullptr,
            bytes_of(output),
            output.nbytes(),
            root);
      });
}

WorkPtr ShmBackend::reduce(
    const Call& call,
    at::Tensor tensor,
    int root,
    const c10d::ReduceOp& op,
    bool async) {
  return run(
      call,
      c10d::OpType::REDUCE,
      async,
      {tensor},
      [this, call, tensor, root, reduction = reduction_of(tensor, op)] {
        collectives_->reduce(
            call, bytes_of(tensor), tensor.nbytes(), reduction, root);
      });
}

WorkPtr ShmBackend::send(
    const Call& call,
    const at::Tensor& tensor,
    int to,
    int tag,
    bool async) {
  return messenger_->send(call, tensor, to, tag, async);
}

WorkPtr ShmBackend::recv(
    const Call& call,
    const at::Tensor& tensor,
    int from,
    int tag,
    bool async) {
  return messenger_->receive(call, tensor, from, tag, async);
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

CarrierPtr make_shm_backend(const BackendConfig& config) {
  auto backend = c10::make_intrusive<ShmBackend>(config);
  Carrier* carrier = backend.get();
  // c10d holds the same object, and counts who does.
  return CarrierPtr(carrier, [backend = std::move(backend)](Carrier*) {});
}

} // namespace tessera::comm
