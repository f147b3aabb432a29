#include "libtorch/backward_stream.h"

#include <torch/csrc/autograd/variable.h>

#include "libtorch/autograd_compat.h"

namespace tessera::libtorch {

void use_current_stream(const at::Tensor& leaf) {
  const NodePtr accumulator = torch::autograd::impl::grad_accumulator(leaf);
  if (accumulator) {
    use_current_stream(*accumulator, leaf);
  }
}

void use_current_stream(
    torch::autograd::Node& accumulator,
    const at::Tensor& leaf) {
  accumulator.clear_input_metadata();
  accumulator.add_input_metadata(leaf);
}

} // namespace tessera::libtorch
