// How autograd nodes are held: by intrusive_ptr from LibTorch 2.13 on, before
// that by shared_ptr.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

#include "libtorch/compat.h"

namespace tessera::libtorch {

using NodePtr = decltype(torch::autograd::Edge::function);
#if TESSERA_TORCH_AT_LEAST(2, 13)
using WeakNodePtr = c10::weak_intrusive_ptr<torch::autograd::Node>;
inline WeakNodePtr no_node() {
  return WeakNodePtr(NodePtr());
}
#else
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;
inline WeakNodePtr no_node() {
  return {};
}
#endif

template <class T, class... Arguments>
auto make_node(Arguments&&... arguments) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
#else
  return std::shared_ptr<T>(
      new T(std::forward<Arguments>(arguments)...),
      torch::autograd::deleteNode);
#endif
}

} // namespace tessera::libtorch
