// A carrier for a backend that takes nothing but c10d's own arguments.
#pragma once

#include <functional>
#include <vector>

#include "comm/backends/carrier.h"

namespace tessera::comm {

/// The call is not passed on, except to start(). Messages are for classes that
/// derive.
class C10dCarrier : public Carrier {
 public:
  C10dCarrier(BackendPtr backend, const Capabilities& capabilities);

  BackendPtr backend() override {
    return backend_;
  }

  WorkPtr all_gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      bool async) override;
  WorkPtr reduce_scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      const c10d::ReduceOp& op,
      bool async) override;
  WorkPtr all_reduce(
      const Call& call,
      at::Tensor tensor,
      const c10d::ReduceOp& op,
      bool async) override;
  WorkPtr broadcast(const Call& call, at::Tensor tensor, int root, bool async)
      override;
  WorkPtr all_to_all(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      std::vector<int64_t> output_splits,
      std::vector<int64_t> input_splits,
      bool async) override;
  WorkPtr barrier(const Call& call, bool async) override;
  WorkPtr gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) override;
  WorkPtr scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) override;
  WorkPtr reduce(
      const Call& call,
      at::Tensor tensor,
      int root,
      const c10d::ReduceOp& op,
      bool async) override;

 private:
  /// Runs `operation`, which starts the collectives of `call` on the backend.
  virtual WorkPtr start(
      const Call& call,
      const std::function<WorkPtr()>& operation);

  const BackendPtr backend_;
};

} // namespace tessera::comm
