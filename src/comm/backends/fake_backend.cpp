#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"
#include "comm/backends/done_work.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Shapes and memory as if all ranks were there; nothing is sent.
class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override {
    return "fake";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return done(c10d::OpType::BROADCAST, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done(c10d::OpType::ALLREDUCE, tensors);
  }

  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    auto parts = output.view({getSize(), -1});
    parts.copy_(input.reshape({1, -1}).expand_as(parts));
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    for (at::Tensor& output : outputs.at(0)) {
      output.copy_(inputs.at(0));
    }
    return done(c10d::OpType::ALLGATHER, outputs.at(0));
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions&) override {
    output.copy_(
        input.view({getSize(), -1}).select(0, getRank()).view_as(output));
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
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
    return done(c10d::OpType::ALLTOALL_BASE, {output});
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return done(c10d::OpType::BARRIER, {});
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions&) override {
    Tensors parts = outputs.empty() ? Tensors{} : outputs.front();
    for (at::Tensor& part : parts) {
      part.copy_(inputs.at(0));
    }
    return done(c10d::OpType::GATHER, std::move(parts));
  }

  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions&) override {
    if (!inputs.empty()) {
      outputs.at(0).copy_(inputs.front().at(static_cast<size_t>(getRank())));
    }
    return done(c10d::OpType::SCATTER, outputs);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return done(c10d::OpType::REDUCE, tensors);
  }

  WorkPtr send(Tensors& tensors, int, int) override {
    return done(c10d::OpType::SEND, tensors);
  }

  WorkPtr recv(Tensors& tensors, int, int) override {
    return done(c10d::OpType::RECV, tensors);
  }

 private:
  static WorkPtr done(c10d::OpType type, Tensors outputs) {
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }
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
      c10::make_intrusive<FakeBackend>(config.rank, config.size()),
      Capabilities{.takes_every_dtype = true});
}

} // namespace tessera::comm
