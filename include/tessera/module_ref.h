#pragma once

#include <tessera/api.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace tessera {

namespace detail {

/// FSDP, DistributedDataParallel: not a module, but made of one.
template <class H>
concept ModuleHandle =
    !std::derived_from<H, torch::nn::Module> && requires(const H& handle) {
  {
    handle.module()
    } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

/// Throws c10::ValueError: a holder of this class has no module.
[[noreturn]] TESSERA_API void refuse_empty_holder(const std::type_info& module);

} // namespace detail

/// A module as an argument, in whichever form a program has the module:
///
///   tessera::fully_shard(block);  // a holder (TORCH_MODULE), a Sequential,
///                                 // an AnyModule, or a std::shared_ptr
///   tessera::fully_shard(*this);  // a torch::nn::Module&
///   tessera::parameters(fsdp);    // an FSDP or DistributedDataParallel
///
/// Functions take a ModuleRef by value; programs need not name the class. A
/// ModuleRef does not keep the module alive. An empty holder or a null pointer
/// throws c10::ValueError. A const module does not compile, nor does a const
/// holder, by which LibTorch gives a const module: take the holder by `auto&`.
class TESSERA_API ModuleRef {
 public:
  /// The module itself.
  ModuleRef(torch::nn::Module& module) : module_(&module) {}
  ModuleRef(const torch::nn::Module&) = delete; // the module is const

  /// The module of a holder, which may be a temporary one.
  template <class M>
  ModuleRef(torch::nn::ModuleHolder<M>& holder) : ModuleRef(impl_of(holder)) {}
  /// The same.
  template <class M>
  ModuleRef(torch::nn::ModuleHolder<M>&& holder) : ModuleRef(impl_of(holder)) {}
  template <class M>
  ModuleRef(const torch::nn::ModuleHolder<M>&) = delete; // the holder is const

  /// The module that a pointer points to.
  template <std::derived_from<torch::nn::Module> M>
  requires(!std::is_const_v<M>) ModuleRef(const std::shared_ptr<M>& pointer)
      : module_(pointer.get()) {
    if (module_ == nullptr) {
      detail::refuse_empty_holder(typeid(M));
    }
  }

  /// The module in an AnyModule.
  ModuleRef(const torch::nn::AnyModule& module);

  /// The module that an FSDP or a DistributedDataParallel was made with.
  template <detail::ModuleHandle H>
  ModuleRef(const H& handle)
      : ModuleRef(std::shared_ptr<torch::nn::Module>(handle.module())) {}

  /// The module, which must be alive.
  torch::nn::Module& get() const {
    return *module_;
  }
  /// The same, for calls that take a torch::nn::Module&.
  operator torch::nn::Module&() const {
    return *module_;
  }
  torch::nn::Module& operator*() const {
    return *module_;
  }
  torch::nn::Module* operator->() const {
    return module_;
  }

 private:
  template <class M>
  static torch::nn::Module& impl_of(torch::nn::ModuleHolder<M>& holder) {
    if (holder.is_empty()) {
      detail::refuse_empty_holder(typeid(M));
    }
    return *holder;
  }

  torch::nn::Module* module_; // not null
};

/// Several modules: {block, *this}.
using ModuleRefs = std::vector<ModuleRef>;

} // namespace tessera
