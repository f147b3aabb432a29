#include <tessera/error.h>
#include <tessera/module_ref.h>

#include <c10/util/Type.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

namespace tessera {
namespace detail {

void refuse_empty_holder(const std::type_info& module) {
  raise<c10::ValueError>(
      {},
      fmt::format(
          "a module was expected, and this holder of a {} is empty. Give it a module first: one that is declared with `= nullptr` is set in its parent's constructor, by register_module.",
          c10::demangle(module.name())));
}

} // namespace detail

ModuleRef::ModuleRef(const torch::nn::AnyModule& module)
    : module_(module.is_empty() ? nullptr : module.ptr().get()) {
  if (module_ == nullptr) {
    detail::refuse_empty_holder(typeid(torch::nn::AnyModule));
  }
}

} // namespace tessera
