#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/ddp/comm_hook.h>
#include <tessera/ddp/join.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <utility>

namespace tessera {

/// DistributedDataParallel's constructor options, with Python's names and
/// defaults.
struct TESSERA_API DDPOptions {
  /// The ranks that train copies of the model; default: the world.
  TORCH_ARG(std::optional<Group>, process_group) = std::nullopt;
  /// Every rank starts with the parameters and buffers of rank 0. If off, they
  /// must be equal already.
  TORCH_ARG(bool, init_sync) = true;
  /// A call of the handle begins with rank 0's buffers on every rank.
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// Gradients are sent in buckets of this size; the first bucket is smaller,
  /// so that it starts early.
  TORCH_ARG(double, bucket_cap_mb) = 25;
  TORCH_ARG(double, first_bucket_mb) = 1;
  /// Parameters may get no gradient in a backward. Costs nothing unless that
  /// happens. If off, every rank throws an error that names such parameters.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Gradients live in the buckets: no copies, and no second set of gradients.
  /// After zero_grad() with undefined gradients they are copied once.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// The same parameters are used in every iteration. Those that never get a
  /// gradient are tolerated.
  TORCH_ARG(bool, static_graph) = false;
};

namespace detail {

/// The part of DistributedDataParallel that does not depend on the module's
/// type.
class TESSERA_API DDPHandle : public Joinable {
 public:
  ~DDPHandle() override;
  DDPHandle(const DDPHandle&) = delete;
  DDPHandle& operator=(const DDPHandle&) = delete;

  /// Gradients of backwards that begin while the guard lives accumulate on each
  /// rank; the next backward after that reduces the sums.
  class [[nodiscard]] TESSERA_API NoSync {
   public:
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DDPHandle;
    explicit NoSync(DDPHandle& handle);
    DDPHandle& handle_;
    const bool before_;
  };
  /// Gradients are not reduced while the returned guard lives.
  NoSync no_sync() {
    return NoSync(*this);
  }
  /// If off, gradients accumulate on each rank, as under no_sync().
  void set_requires_gradient_sync(bool on);

  /// Averages the gradients that accumulated since the last reduction, as the
  /// next backward would, without a backward. A rank where none accumulated
  /// contributes zeros and gets the averages too. Collective; throws as a
  /// backward does.
  void reduce_gradients();

  /// Reduces buckets with `hook` from the next backward on. Throws if a hook is
  /// registered already. Collective.
  void register_comm_hook(CommHook hook);
  /// True once buckets are final: after the first backward that reduces, or the
  /// second under static_graph.
  bool has_rebuilt_buckets() const;

  /// A rank without inputs contributes zeros, and gets the model of a rank that
  /// trained to the end. Averages are still over all ranks.
  std::unique_ptr<JoinHook> join_hook(const JoinArguments& arguments) override;
  /// See Joinable.
  at::Device join_device() const override;
  Group join_process_group() const override;

 protected:
  /// For DistributedDataParallel, which knows the module's type.
  DDPHandle(
      std::shared_ptr<torch::nn::Module> module,
      const DDPOptions& options);
  /// Buffers, and Join's notice.
  void before_forward();

 private:
  class Hook;
  struct Impl;

  bool is_joined() const;
  void announce(bool reduces, bool sends_buffers);
  void before_reduction();

  std::unique_ptr<Impl> impl_;
};

} // namespace detail

/// Trains copies of a model, one per rank: each rank computes gradients for its
/// own inputs, which are averaged over the ranks while backward runs.
///
///   DistributedDataParallel ddp(model);
///   optim::AdamW optimizer(model->parameters(), 1e-3);
///   ddp(input).square().mean().backward();
///   optimizer.step();
///
/// The module is not changed, and its parameters stay the leaves they are. As
/// long as the handle lives, every backward that reaches them is a collective
/// over the process group, whether the forward was called through the handle or
/// not; only the work before a forward (buffers, Join) needs the handle.
/// Parameters that are frozen when the handle is made are left alone. Gradients
/// of a sparse embedding become dense.
///
/// A backward throws DisagreementError on every rank if, since the last
/// reduction, ranks made different numbers of forwards through the handle, or
/// of steps of Tessera's optimizers: a backward of one of them reduced nothing.
///
/// The constructor is collective. It throws on every rank DisagreementError if
/// the models differ in names, shapes, dtypes or what is trainable,
/// c10::ValueError for a module without trainable parameters, on the meta
/// device or sharded by FSDP.
template <class M>
class DistributedDataParallel : public detail::DDPHandle {
 public:
  /// Shares the module. Collective.
  explicit DistributedDataParallel(
      std::shared_ptr<M> module,
      const DDPOptions& options = {})
      : DDPHandle(module, options), typed_(std::move(module)) {}
  explicit DistributedDataParallel(
      const torch::nn::ModuleHolder<M>& module,
      const DDPOptions& options = {})
      : DistributedDataParallel(module.ptr(), options) {}

  /// Calls the module's forward after the work that has to precede it.
  /// Collective if the module has buffers.
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    before_forward();
    return typed_->forward(std::forward<Arguments>(arguments)...);
  }

  M* operator->() const {
    return typed_.get();
  }
  M& operator*() const {
    return *typed_;
  }
  /// The module it was made of.
  const std::shared_ptr<M>& module() const {
    return typed_;
  }

 private:
  std::shared_ptr<M> typed_;
};

} // namespace tessera
