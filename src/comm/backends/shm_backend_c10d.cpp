// ShmBackend as a c10d::Backend: each call is described by its tensors and goes
// to the Carrier's collective, or to Gloo.
#include <ATen/ops/empty.h>

#include "comm/backends/done_work.h"
#include "comm/backends/shm_backend.h"
#include "comm/backends/shm_tensors.h"
#include "comm/diagnostics/describe_call.h"

namespace tessera::comm {

Call ShmBackend::make_call(const char* operation, const at::Tensor& input) {
  Call call = describe_call(operation, input);
  call.sequence = sequence_++;
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

} // namespace tessera::comm
