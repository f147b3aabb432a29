#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"
#include "comm/backends/done_work.h"
#include "comm/backends/fake_wire.h"

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

/// Shapes and memory as if all ranks were there; nothing is sent.
class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(const BackendConfig& config, c10::DeviceType device)
      : Backend(config.rank, config.size()),
        speed_(config.fake_wire),
        device_(device) {}

  const std::string getBackendName() const override {
    return "fake";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return carry(
        {.type = c10d::OpType::BROADCAST,
         .outputs = tensors,
         .sent_bytes = bytes_of(tensors)});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return carry(
        {.type = c10d::OpType::ALLREDUCE,
         .outputs = tensors,
         .sent_bytes = 2 * part_of(tensors)});
  }

  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    return carry(
        {.type = c10d::OpType::_ALLGATHER_BASE,
         .outputs = {output},
         .inputs = {input},
         .sent_bytes = part_of({output}),
         .move = [=, this] {
           auto parts = output.view({getSize(), -1});
           parts.copy_(input.reshape({1, -1}).expand_as(parts));
         }});
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    return carry(
        {.type = c10d::OpType::ALLGATHER,
         .outputs = outputs.at(0),
         .inputs = inputs,
         .sent_bytes = part_of(outputs.at(0)),
         .move = [parts = outputs.at(0), mine = inputs.at(0)] {
           copy_to_all(parts, mine);
         }});
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions&) override {
    return carry(
        {.type = c10d::OpType::_REDUCE_SCATTER_BASE,
         .outputs = {output},
         .inputs = {input},
         .sent_bytes = part_of({input}),
         .move = [=, this] {
           output.copy_(input.view({getSize(), -1})
                            .select(0, getRank())
                            .view_as(output));
         }});
  }

  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return carry(
        {.type = c10d::OpType::ALLTOALL_BASE,
         .outputs = {output},
         .inputs = {input},
         .sent_bytes = part_of({input}),
         .move = [=] {
           const int64_t count = std::min(output.numel(), input.numel());
           output.view(-1)
               .narrow(0, 0, count)
               .copy_(input.view(-1).narrow(0, 0, count));
         }});
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return carry({.type = c10d::OpType::BARRIER});
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions&) override {
    Tensors parts = outputs.empty() ? Tensors{} : outputs.front();
    return carry(
        {.type = c10d::OpType::GATHER,
         .outputs = parts,
         .inputs = inputs,
         .sent_bytes = others_of(inputs),
         .move = [=, mine = inputs.at(0)] { copy_to_all(parts, mine); }});
  }

  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions&) override {
    FakeTransfer transfer{
        .type = c10d::OpType::SCATTER,
        .outputs = outputs,
        .sent_bytes = others_of(outputs)};
    if (!inputs.empty()) {
      transfer.inputs = inputs.front();
      transfer.move = [output = outputs.at(0),
                       mine =
                           inputs.front().at(static_cast<size_t>(getRank()))] {
        output.copy_(mine);
      };
    }
    return carry(std::move(transfer));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return carry(
        {.type = c10d::OpType::REDUCE,
         .outputs = tensors,
         .sent_bytes = bytes_of(tensors)});
  }

  WorkPtr send(Tensors& tensors, int, int) override {
    return carry(
        {.type = c10d::OpType::SEND,
         .outputs = tensors,
         .sent_bytes = bytes_of(tensors)});
  }

  WorkPtr recv(Tensors& tensors, int, int) override {
    return carry(
        {.type = c10d::OpType::RECV,
         .outputs = tensors,
         .sent_bytes = bytes_of(tensors)});
  }

 private:
  /// What the root gets, or sends, of parts like this.
  int64_t others_of(const Tensors& part) const {
    return (getSize() - 1) * bytes_of(part);
  }

  int64_t part_of(const Tensors& tensors) const {
    return sent_of(bytes_of(tensors), getSize());
  }

  static void copy_to_all(const Tensors& parts, const at::Tensor& mine) {
    for (const at::Tensor& part : parts) {
      part.copy_(mine);
    }
  }

  WorkPtr carry(FakeTransfer transfer) {
    if (speed_.takes_time()) {
      // Threads may be the first together.
      std::call_once(wire_is_made_, [this] {
        wire_ = device_ == c10::kCPU ? make_host_wire(speed_)
                                     : make_cuda_wire(speed_);
      });
      return wire_->carry(std::move(transfer));
    }
    if (transfer.move) {
      transfer.move();
    }
    return c10::make_intrusive<DoneWork>(
        transfer.type, std::move(transfer.outputs));
  }

  const WireSpeed speed_;
  const c10::DeviceType device_;
  std::once_flag wire_is_made_;
  std::unique_ptr<FakeWire> wire_; // made by the first that takes time
};

/// Messages are accepted and dropped; recv() leaves its tensor as it is.
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

CarrierPtr make_fake_backend(
    const BackendConfig& config,
    c10::DeviceType device) {
  return std::make_shared<FakeCarrier>(
      c10::make_intrusive<FakeBackend>(config, device),
      Capabilities{.takes_every_dtype = true});
}

} // namespace tessera::comm
