#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"
#include "comm/backends/done_work.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

using Time = std::chrono::steady_clock::time_point;

/// A collective that ends at its time. Its future is completed by whoever waits
/// for it.
class TimedWork : public c10d::Work {
 public:
  TimedWork(c10d::OpType type, Tensors outputs, Time end)
      : Work(-1, type), outputs_(std::move(outputs)), end_(end) {}

  bool isCompleted() override {
    return std::chrono::steady_clock::now() >= end_;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    std::this_thread::sleep_until(end_);
    if (!is_told_.exchange(true)) {
      future_->markCompleted(c10::IValue(outputs_));
    }
    return true;
  }
  Tensors result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const Tensors outputs_;
  const Time end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()));
  std::atomic<bool> is_told_{false};
};

/// Makes collectives take the time that they would take on a network, one after
/// the other. They take nothing from those who compute: whoever waits for one
/// sleeps.
class FakeWire {
 public:
  explicit FakeWire(const WireSpeed& speed) : speed_(speed) {}

  WorkPtr carry(c10d::OpType type, Tensors outputs, int64_t sent_bytes) {
    return c10::make_intrusive<TimedWork>(
        type, std::move(outputs), end_of(sent_bytes));
  }

 private:
  Time end_of(int64_t sent_bytes) {
    constexpr double kLongest = 24 * 3600; // what a Time can be added to
    const std::chrono::duration<double> takes(
        std::min(speed_.seconds(sent_bytes), kLongest));
    const MutexLock lock(mutex_);
    free_at_ = std::max(free_at_, std::chrono::steady_clock::now()) +
        std::chrono::duration_cast<Time::duration>(takes);
    return free_at_;
  }

  const WireSpeed speed_;

  Mutex mutex_;
  Time free_at_ TESSERA_GUARDED_BY(mutex_);
};

/// Shapes and memory as if all ranks were there; nothing is sent.
class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, const WireSpeed& speed)
      : Backend(rank, size) {
    if (std::isfinite(speed.bytes_per_second) || speed.latency_seconds > 0) {
      wire_.emplace(speed);
    }
  }

  const std::string getBackendName() const override {
    return "fake";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return work_for(c10d::OpType::BROADCAST, tensors, bytes_of(tensors));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return work_for(c10d::OpType::ALLREDUCE, tensors, 2 * part_of(tensors));
  }

  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    auto parts = output.view({getSize(), -1});
    parts.copy_(input.reshape({1, -1}).expand_as(parts));
    return work_for(c10d::OpType::_ALLGATHER_BASE, {output}, part_of({output}));
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    for (at::Tensor& output : outputs.at(0)) {
      output.copy_(inputs.at(0));
    }
    return work_for(
        c10d::OpType::ALLGATHER, outputs.at(0), part_of(outputs.at(0)));
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions&) override {
    output.copy_(
        input.view({getSize(), -1}).select(0, getRank()).view_as(output));
    return work_for(
        c10d::OpType::_REDUCE_SCATTER_BASE, {output}, part_of({input}));
  }

  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    const int64_t count = std::min(output.numel(), input.numel());
    output.view(-1)
        .narrow(0, 0, count)
        .copy_(input.view(-1).narrow(0, 0, count));
    return work_for(c10d::OpType::ALLTOALL_BASE, {output}, part_of({input}));
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return work_for(c10d::OpType::BARRIER, {}, 0);
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions&) override {
    Tensors parts = outputs.empty() ? Tensors{} : outputs.front();
    for (at::Tensor& part : parts) {
      part.copy_(inputs.at(0));
    }
    return work_for(c10d::OpType::GATHER, std::move(parts), others_of(inputs));
  }

  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions&) override {
    if (!inputs.empty()) {
      outputs.at(0).copy_(inputs.front().at(static_cast<size_t>(getRank())));
    }
    return work_for(c10d::OpType::SCATTER, outputs, others_of(outputs));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return work_for(c10d::OpType::REDUCE, tensors, bytes_of(tensors));
  }

  WorkPtr send(Tensors& tensors, int, int) override {
    return work_for(c10d::OpType::SEND, tensors, bytes_of(tensors));
  }

  WorkPtr recv(Tensors& tensors, int, int) override {
    return work_for(c10d::OpType::RECV, tensors, bytes_of(tensors));
  }

 private:
  /// What the root gets, or sends, of parts like this.
  int64_t others_of(const Tensors& part) const {
    return (getSize() - 1) * bytes_of(part);
  }

  int64_t part_of(const Tensors& tensors) const {
    return sent_of(bytes_of(tensors), getSize());
  }

  WorkPtr work_for(c10d::OpType type, Tensors outputs, int64_t sent_bytes) {
    if (wire_) {
      return wire_->carry(type, std::move(outputs), sent_bytes);
    }
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }

  std::optional<FakeWire> wire_; // nothing: nothing takes time
};

/// Messages are taken, and what is received is what was there before.
class FakeCarrier : public C10dCarrier {
 public:
  using C10dCarrier::C10dCarrier;

  WorkPtr send(const Call&, const at::Tensor& tensor, int to, int tag, bool)
      override {
    Tensors tensors{tensor};
    return backend()->send(tensors, to, tag);
  }
  WorkPtr recv(const Call&, const at::Tensor& tensor, int from, int tag, bool)
      override {
    Tensors tensors{tensor};
    return backend()->recv(tensors, from, tag);
  }
};

} // namespace

CarrierPtr make_fake_backend(const BackendConfig& config) {
  return std::make_shared<FakeCarrier>(
      c10::make_intrusive<FakeBackend>(
          config.rank, config.size(), config.fake_wire),
      Capabilities{.takes_every_dtype = true});
}

} // namespace tessera::comm
