#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Options of recompute() and apply_activation_checkpointing().
struct TESSERA_API RecomputeOptions {
  /// Gives the second run the random numbers of the first, so that dropout
  /// drops the same: those of the CPU, of the devices of the inputs and of the
  /// current one. If off, saves a few KB and microseconds per call.
  TORCH_ARG(bool, preserve_rng_state) = true;
};

namespace detail {

TESSERA_API std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> fn,
    const std::vector<at::Tensor>& inputs,
    const RecomputeOptions& options);

template <class F>
inline constexpr bool kMapsTensor =
    std::is_invocable_r_v<at::Tensor, F&, const at::Tensor&>;

template <class F>
inline constexpr bool kHoldsModule = std::is_constructible_v<ModuleRef, F&> &&
    !std::is_base_of_v<torch::nn::Module, F>;

/// Asks the module, since the holder of a Sequential, whose forward is a
/// template, cannot tell.
template <class M>
concept MapsTensorByForward = std::derived_from<M, torch::nn::Module> &&
    requires(M& module, const at::Tensor& input) {
  { module.forward(input) } -> std::convertible_to<at::Tensor>;
};

} // namespace detail

/// Activation checkpointing: returns fn(inputs), keeps only the inputs, and
/// makes backward run `fn` once more for the activations it needs. `fn` takes
/// and returns vectors of tensors. Gradients are bit-equal to those without
/// recompute(), except for tensors that are used more than 4 times in `fn` and
/// outside `fn` too, and for unsharded parameters that several calls share
/// under autocast: these are added up in another order.
///
/// Whatever `fn` uses gets its gradients, also parameters and activations that
/// it captures, and also if no input requires one. Inputs may be undefined, of
/// any dtype, and with or without gradient; so may outputs. The second run has
/// the random numbers and the autocast state of the first. Nesting,
/// retain_graph, torch::autograd::grad() and gradients of gradients work.
/// Without grad mode, recompute() just calls `fn`.
///
/// `fn` is kept until its part of the graph is freed: capture by value what
/// does not live that long (holders of modules are pointers). It must do the
/// same both times; backward throws if shapes, dtypes or the parameters used
/// differ, or if an input or a parameter was changed in place since. What `fn`
/// throws in backward, backward() throws. Its side effects happen twice: batch
/// norm counts a batch twice, a hook it adds to an input runs twice.
///
/// Not collective in itself; with sharded parameters `fn` is collective, as any
/// use of them is.
template <class F>
std::enable_if_t<!detail::kMapsTensor<F>, std::vector<at::Tensor>> recompute(
    F fn,
    const std::vector<at::Tensor>& inputs,
    const RecomputeOptions& options = {}) {
  return detail::recompute(std::move(fn), inputs, options);
}

/// The same from one tensor to one tensor: recompute(block, x). `fn` may be a
/// holder of a module (a Sequential is one), a std::shared_ptr to a module or
/// an AnyModule, which call the module's forward; throws c10::ValueError if the
/// holder is empty.
template <class F>
std::enable_if_t<detail::kMapsTensor<F>, at::Tensor> recompute(
    F fn,
    const at::Tensor& input,
    const RecomputeOptions& options = {}) {
  if constexpr (detail::kHoldsModule<F>) {
    (void)ModuleRef(fn); // an empty holder cannot be called
  }
  const auto run =
      [fn = std::move(fn)](const std::vector<at::Tensor>& inputs) mutable {
        return std::vector<at::Tensor>{fn(inputs.front())};
      };
  return detail::recompute(run, {input}, options).front();
}
template <detail::MapsTensorByForward M>
at::Tensor recompute(
    const std::shared_ptr<M>& module,
    const at::Tensor& input,
    const RecomputeOptions& options = {}) {
  (void)ModuleRef(module); // a null pointer cannot be called
  return recompute(
      [module](const at::Tensor& x) -> at::Tensor {
        return module->forward(x);
      },
      input,
      options);
}
inline at::Tensor recompute(
    torch::nn::Sequential module,
    const at::Tensor& input,
    const RecomputeOptions& options = {}) {
  (void)ModuleRef(module); // an empty one cannot be called
  return recompute(module.ptr(), input, options);
}
inline at::Tensor recompute(
    const torch::nn::AnyModule& module,
    const at::Tensor& input,
    const RecomputeOptions& options = {}) {
  (void)ModuleRef(module); // an empty one cannot be called
  return recompute(
      [copy = torch::nn::AnyModule(module)](const at::Tensor& x) mutable {
        return copy.forward(x);
      },
      input,
      options);
}

/// True while backward runs a function of recompute() again, on this thread.
/// A module whose forward has an effect that must happen once per step
/// (statistics, a counter) asks for it.
TESSERA_API bool is_recomputing();

/// A module that does not call the forward of its submodules, such as a model
/// of load_exported(), and so must put them under recompute() itself.
/// apply_activation_checkpointing() asks it to.
class TESSERA_API RecomputesSubmodules {
 public:
  virtual ~RecomputesSubmodules() = default;

  /// Puts these submodules under recompute(), besides those that already are.
  /// Throws, with nothing changed, if one of them cannot be.
  virtual void recompute_submodules(
      const std::vector<const torch::nn::Module*>& submodules,
      const RecomputeOptions& options) = 0;
};

/// Puts the submodules for which `which` returns true under recompute() and
/// returns how many. `which` is not called for the module itself, nor for
/// modules that are under recompute() already. May be called before or after
/// fully_shard.
///
/// An element of a torch::nn::Sequential is replaced there by a module that
/// calls it, and that has it as its child `_checkpoint_wrapped_module`. A
/// Sequential that is a member of its parent is recomputed as a whole: the
/// object stays, and its elements move into a module that becomes its only
/// element. These segments show in the names LibTorch gives, also in what
/// torch::save writes, but not in tessera's names.
///
/// Elements take up to 8 arguments of any type and return a tensor; if one
/// returns something else, its forward throws. Calls that do not go through the
/// Sequential are as they were; Sequential::at<Block>(i) no longer finds the
/// Block. A Sequential that is recomputed as a whole cannot be cloned.
///
/// In a model of load_exported() any submodule may be chosen whose nodes follow
/// one another in the program; nothing is replaced there.
///
/// Throws, with nothing changed, if a submodule for which `which` returns true
/// is neither an element of a Sequential nor a Sequential that has nothing
/// beside its elements: its parent calls it through a member whose type cannot
/// be replaced. Call recompute() in the parent's forward instead.
TESSERA_API int64_t apply_activation_checkpointing(
    ModuleRef module,
    const std::function<bool(const torch::nn::Module&)>& which,
    const RecomputeOptions& options = {});

namespace detail {

template <class M>
bool is_module_of(const torch::nn::Module& module) {
  if constexpr (requires { typename M::ContainedType; }) { // a holder
    return dynamic_cast<const typename M::ContainedType*>(&module) != nullptr;
  } else {
    return dynamic_cast<const M*>(&module) != nullptr;
  }
}

} // namespace detail

/// The same for all submodules of these classes, given as holders or as Impls:
/// apply_activation_checkpointing<Block>(model).
template <class M, class... Others>
int64_t apply_activation_checkpointing(
    ModuleRef module,
    const RecomputeOptions& options = {}) {
  return apply_activation_checkpointing(
      module,
      [](const torch::nn::Module& submodule) {
        return detail::is_module_of<M>(submodule) ||
            (detail::is_module_of<Others>(submodule) || ...);
      },
      options);
}

} // namespace tessera
