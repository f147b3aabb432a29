#include "comm/backends/c10d_carrier.h"

#include <utility>

namespace tessera::comm {
namespace {

/// One flat tensor per rank, as c10d takes the parts of a gather or scatter.
std::vector<std::vector<at::Tensor>> parts_of(
    const at::Tensor& whole,
    int num_ranks) {
  if (!whole.defined()) {
    return {};
  }
  return {whole.view({num_ranks, -1}).unbind()};
}

} // namespace

C10dCarrier::C10dCarrier(BackendPtr backend, const Capabilities& capabilities)
    : Carrier(capabilities), backend_(std::move(backend)) {}

WorkPtr C10dCarrier::start(
    const Call& /*call*/,
    const std::function<WorkPtr()>& operation) {
  return operation();
}

WorkPtr C10dCarrier::all_gather(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return start(
      call, [&] { return backend_->_allgather_base(output, input, options); });
}

WorkPtr C10dCarrier::reduce_scatter(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    const c10d::ReduceOp& op,
    bool async) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  options.asyncOp = async;
  return start(call, [&] {
    return backend_->_reduce_scatter_base(output, input, options);
  });
}

WorkPtr C10dCarrier::all_reduce(
    const Call& call,
    at::Tensor tensor,
    const c10d::ReduceOp& op,
    bool async) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = async;
  Tensors tensors{std::move(tensor)};
  return start(call, [&] { return backend_->allreduce(tensors, options); });
}

WorkPtr C10dCarrier::broadcast(
    const Call& call,
    at::Tensor tensor,
    int root,
    bool async) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = async;
  Tensors tensors{std::move(tensor)};
  return start(call, [&] { return backend_->broadcast(tensors, options); });
}

WorkPtr C10dCarrier::all_to_all(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    std::vector<int64_t> output_splits,
    std::vector<int64_t> input_splits,
    bool async) {
  c10d::AllToAllOptions options;
  options.asyncOp = async;
  return start(call, [&] {
    return backend_->alltoall_base(
        output, input, output_splits, input_splits, options);
  });
}

WorkPtr C10dCarrier::barrier(const Call& call, bool async) {
  c10d::BarrierOptions options;
  options.asyncOp = async;
  return start(call, [&] { return backend_->barrier(options); });
}

WorkPtr C10dCarrier::gather(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    int root,
    bool async) {
  if (input.numel() == 0) { // unbind() of nothing gives no parts
    return barrier(call, async);
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  options.asyncOp = async;
  auto outputs = parts_of(output, backend_->getSize());
  Tensors inputs{input.view({-1})};
  return start(
      call, [&] { return backend_->gather(outputs, inputs, options); });
}

WorkPtr C10dCarrier::scatter(
    const Call& call,
    at::Tensor output,
    at::Tensor input,
    int root,
    bool async) {
  if (output.numel() == 0) {
    return barrier(call, async);
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  options.asyncOp = async;
  Tensors outputs{output.view({-1})};
  auto inputs = parts_of(input, backend_->getSize());
  return start(
      call, [&] { return backend_->scatter(outputs, inputs, options); });
}

WorkPtr C10dCarrier::reduce(
    const Call& call,
    at::Tensor tensor,
    int root,
    const c10d::ReduceOp& op,
    bool async) {
  c10d::ReduceOptions options;
  options.reduceOp = op;
  options.rootRank = root;
  options.asyncOp = async;
  Tensors tensors{std::move(tensor)};
  return start(call, [&] { return backend_->reduce(tensors, options); });
}

} // namespace tessera::comm
