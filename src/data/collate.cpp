#include <tessera/data/collate.h>

#include <ATen/ops/stack.h>

namespace tessera::data::detail {

at::Tensor stack(const std::vector<at::Tensor>& tensors) {
  return at::stack(tensors);
}

} // namespace tessera::data::detail
