#include "comm/backends/carrier.h"

#include <tessera/error.h>

#include <utility>

namespace tessera::comm {
namespace {

class C10dCarrier : public Carrier {
 public:
  C10dCarrier(BackendPtr backend, const Capabilities& capabilities)
      : Carrier(capabilities), backend_(std::move(backend)) {}

  BackendPtr backend() override {
    return backend_;
  }

  WorkPtr all_gather(
      const Call&,
      at::Tensor output,
      at::Tensor input,
      bool async) override {
    c10d::AllgatherOptions options;
    options.asyncOp = async;
    return backend_->_allgather_base(output, input, options);
  }

  WorkPtr reduce_scatter(
      const Call&,
      at::Tensor output,
      at::Tensor input,
      const c10d::ReduceOp& op,
      bool async) override {
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    options.asyncOp = async;
    return backend_->_reduce_scatter_base(output, input, options);
  }

  WorkPtr all_reduce(
      const Call&,
      at::Tensor tensor,
      const c10d::ReduceOp& op,
      bool async) override {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.asyncOp = async;
    Tensors tensors{std::move(tensor)};
    return backend_->allreduce(tensors, options);
  }

  WorkPtr broadcast(const Call&, at::Tensor tensor, int root, bool async)
      override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = async;
    Tensors tensors{std::move(tensor)};
    return backend_->broadcast(tensors, options);
  }

  WorkPtr all_to_all(
      const Call&,
      at::Tensor output,
      at::Tensor input,
      std::vector<int64_t> output_splits,
      std::vector<int64_t> input_splits,
      bool async) override {
    c10d::AllToAllOptions options;
    options.asyncOp = async;
    return backend_->alltoall_base(
        output, input, output_splits, input_splits, options);
  }

  WorkPtr barrier(const Call&, bool async) override {
    c10d::BarrierOptions options;
    options.asyncOp = async;
    return backend_->barrier(options);
  }

 private:
  const BackendPtr backend_;
};

} // namespace

void Carrier::give_up(const std::string& /*reason*/) {
  backend()->abort();
}

WorkPtr Carrier::all_to_all_pieces(
    const Call&,
    const std::vector<Tensors>&,
    const std::vector<Tensors>&) {
  TESSERA_INTERNAL_ASSERT(false, "this backend shares no memory");
}

at::Tensor Carrier::allocate_shared(at::IntArrayRef, at::ScalarType) {
  TESSERA_INTERNAL_ASSERT(false, "this backend shares no memory");
}

CarrierPtr carry_over(BackendPtr backend, const Capabilities& capabilities) {
  return std::make_shared<C10dCarrier>(std::move(backend), capabilities);
}

} // namespace tessera::comm
