#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/comm/mesh.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>
#include <tessera/fsdp/wrap_policy.h>
#include <tessera/module_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// As in Python's FSDP.
enum class ShardingStrategy {
  FullShard, // parameters are freed between forward and backward
  ShardGradOp, // they stay until backward is done with them
  NoShard, // every rank has all of them; gradients are averaged
  HybridShard, // FullShard within a copy, NoShard between copies
  HybridShardZero2, // ShardGradOp within a copy
};

/// Where shards are kept; see CPUOffloadPolicy for fully_shard.
struct TESSERA_API CPUOffload {
  /// Shards, gradients and optimizer state stay in host memory.
  TORCH_ARG(bool, offload_params) = false;
};

/// Sharded parameters, their gradients and state dicts keep full precision.
struct TESSERA_API MixedPrecision {
  /// The dtype of the gathered parameters; default: that of the shards.
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = std::nullopt;
  /// The dtype in which gradients are averaged; default: param_dtype, as in
  /// Python.
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = std::nullopt;
  /// Floating buffers are cast to this dtype once.
  TORCH_ARG(std::optional<at::ScalarType>, buffer_dtype) = std::nullopt;
  /// See MixedPrecisionPolicy.
  TORCH_ARG(bool, keep_cast_shards) = false;
  /// Calling the handle casts floating tensors among its arguments.
  TORCH_ARG(bool, cast_root_forward_inputs) = true;
};

/// FSDP's constructor options, with Python's names and defaults.
struct TESSERA_API FSDPOptions {
  /// Default: the world.
  TORCH_ARG(std::optional<Group>, process_group) = std::nullopt;
  /// For the hybrid strategies: two axes, copies first.
  TORCH_ARG(std::optional<Mesh>, device_mesh) = std::nullopt;
  /// Whether parameters are sharded, and when they are freed.
  TORCH_ARG(ShardingStrategy, sharding_strategy) = ShardingStrategy::FullShard;
  /// Host memory for shards, gradients and optimizer state.
  TORCH_ARG(CPUOffload, cpu_offload) = {};
  /// Which submodules become units of their own.
  TORCH_ARG(std::optional<WrapPolicy>, auto_wrap_policy) = std::nullopt;
  /// Dtypes to compute and reduce in.
  TORCH_ARG(MixedPrecision, mixed_precision) = {};
  /// Modules whose parameters are not sharded.
  TORCH_ARG(std::vector<std::shared_ptr<torch::nn::Module>>, ignored_modules) =
      {};
  /// What optimizers see: one flat tensor per unit if false, one tensor per
  /// parameter if true.
  TORCH_ARG(bool, use_orig_params) = false;
  /// All ranks first take the parameters and buffers of rank 0.
  TORCH_ARG(bool, sync_module_states) = false;
  /// Compare the values that ranks begin with, by digests, when the model is
  /// first used; not needed with sync_module_states. If off, different values
  /// are accepted.
  TORCH_ARG(bool, compare_start) = true;
  /// Called for every submodule that itself has parameters on the meta device,
  /// after they got memory: initializes them.
  TORCH_ARG(std::function<void(torch::nn::Module&)>, param_init_fn) = nullptr;
  /// Where to move parameters and buffers to before sharding.
  TORCH_ARG(std::optional<at::Device>, device_id) = std::nullopt;
};

/// One unit of a sharded model, as fsdp_units() finds it. A cheap handle that
/// keeps the unit, not the model.
class TESSERA_API FSDPUnit {
 public:
  /// For fsdp_units(); not part of the public contract.
  struct Inner;
  FSDPUnit(std::shared_ptr<const Inner> inner, torch::nn::Module& module);

  /// The path of the unit's module in the outermost sharded module; for that
  /// module itself, its class.
  const std::string& name() const;
  /// Must not be called once the model has been destroyed.
  torch::nn::Module& module() const {
    return *module_;
  }
  /// Whether no other unit contains this one.
  bool is_root() const;
  /// The strategy in effect: on one rank nothing is sharded.
  bool uses_sharded_strategy() const;
  bool offloads_params() const;
  bool use_orig_params() const;

  /// This rank's flat shard, padding included; inside summon_full_params the
  /// flat full parameters.
  at::Tensor flat_param() const;
  /// Elements of the shard, padding included; the same on all ranks.
  int64_t sharded_numel() const;
  /// Elements of flat_param() inside summon_full_params.
  int64_t unsharded_numel() const;
  /// Elements of the unit's full buffer that have memory now.
  int64_t allocated_numel() const;

  /// For the layers below; not part of the public contract.
  const std::shared_ptr<const Inner>& inner() const {
    return inner_;
  }

 private:
  std::shared_ptr<const Inner> inner_;
  torch::nn::Module* module_;
};

/// The units in a module, outer ones first. `root_only`: those that no other
/// unit contains.
TESSERA_API std::vector<FSDPUnit> fsdp_units(
    ModuleRef module,
    bool root_only = false);

namespace detail {

/// The part of a handle that does not depend on the module's type.
class TESSERA_API FSDPHandle {
 public:
  /// For FSDP, which knows the module's type.
  FSDPHandle(
      std::shared_ptr<torch::nn::Module> module,
      const FSDPOptions& options);

  /// As given.
  const FSDPOptions& options() const {
    return options_;
  }
  /// The strategy as given, or NoShard on one rank.
  ShardingStrategy sharding_strategy() const {
    return strategy_;
  }
  /// The module it was made of.
  const std::shared_ptr<torch::nn::Module>& module() const {
    return module_;
  }

 protected:
  /// Lives while the module's forward runs.
  class TESSERA_API ForwardScope {
   public:
    /// The handle must outlive this object.
    explicit ForwardScope(const FSDPHandle& handle);
    ~ForwardScope();
    ForwardScope(const ForwardScope&) = delete;
    ForwardScope& operator=(const ForwardScope&) = delete;

   private:
    std::optional<FSDPUnit> unit_;
  };

  /// A floating tensor in the compute dtype; anything else as it is.
  template <class T>
  decltype(auto) cast_input(T&& input) const {
    if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
      return cast_tensor(input);
    } else {
      return std::forward<T>(input);
    }
  }

 private:
  at::Tensor cast_tensor(const at::Tensor& input) const;

  std::shared_ptr<torch::nn::Module> module_;
  FSDPOptions options_;
  ShardingStrategy strategy_;
};

} // namespace detail

/// A module sharded as Python's FSDP does it. A handle: it wraps nothing in the
/// module tree, names stay as they are, and calling the module's own forward
/// works as well. Calling the handle also casts inputs under mixed precision
/// and refuses summon_full_params inside.
///
///   FSDP model{Net(), FSDPOptions().use_orig_params(true)};
///   auto loss = model(x).sum();
///
/// Collective. Throws on all ranks, with nothing changed but what param_init_fn
/// and device_id ask for, if fully_shard would throw, and for parameters of
/// several dtypes in a unit; without use_orig_params also for a unit that is
/// partly frozen.
template <class M>
class FSDP : public detail::FSDPHandle {
 public:
  /// Shards the module, which the handle then shares. Collective.
  explicit FSDP(std::shared_ptr<M> module, const FSDPOptions& options = {})
      : FSDPHandle(module, options), typed_(std::move(module)) {}
  explicit FSDP(
      const torch::nn::ModuleHolder<M>& module,
      const FSDPOptions& options = {})
      : FSDP(module.ptr(), options) {}

  /// The module's forward, with its arguments cast under mixed precision.
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) const {
    const ForwardScope scope(*this);
    return typed_->forward(cast_input(std::forward<Arguments>(arguments))...);
  }

  M* operator->() const {
    return typed_.get();
  }
  M& operator*() const {
    return *typed_;
  }

 private:
  std::shared_ptr<M> typed_;
};

} // namespace tessera
