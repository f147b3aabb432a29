#pragma once

#include <tessera/api.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>

namespace tessera {

/// Chooses the submodules that become units of their own. The tree is walked
/// bottom-up; `numel` counts the parameters below a module that no unit inside
/// it has taken yet. The policy is not asked about the sharded module itself:
/// it gets all remaining parameters.
struct TESSERA_API WrapPolicy {
  /// Decides about a module with `numel` parameters to take.
  using Decide = std::function<bool(const torch::nn::Module&, int64_t numel)>;

  /// True if the module becomes a unit.
  Decide wraps;
  /// False if the tree below the module is not to be visited. If empty, it
  /// always is.
  Decide descends = nullptr;
};

/// Chooses every submodule, also those without parameters.
TESSERA_API WrapPolicy always_wrap_policy();

/// Chooses submodules with at least `min_numel` parameters that no smaller unit
/// took. Containers without a forward (ModuleList, ModuleDict) and what is
/// inside a MultiheadAttention are left alone, as in Python.
TESSERA_API WrapPolicy
size_based_auto_wrap_policy(int64_t min_numel = 100'000'000);

/// Chooses submodules for which `wraps` returns true.
TESSERA_API WrapPolicy
lambda_auto_wrap_policy(std::function<bool(const torch::nn::Module&)> wraps);

namespace detail {
template <class M>
struct ImplOf {
  using type = M;
};
template <class M>
requires requires {
  typename M::ContainedType;
}
struct ImplOf<M> {
  using type = typename M::ContainedType;
};
} // namespace detail

/// Chooses submodules of the given classes: module_wrap_policy<Block,
/// nn::Linear>(). Takes the holder's or the implementation's name.
template <class... Modules>
WrapPolicy module_wrap_policy() {
  return lambda_auto_wrap_policy([](const torch::nn::Module& module) {
    return (
        (dynamic_cast<const typename detail::ImplOf<Modules>::type*>(&module) !=
         nullptr) ||
        ...);
  });
}

} // namespace tessera
