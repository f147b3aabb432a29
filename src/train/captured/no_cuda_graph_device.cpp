// Without CUDA's headers steps are not recorded.
#include "train/captured/step_graph.h"

namespace tessera::train {

std::unique_ptr<GraphDevice> make_cuda_graph_device(c10::Device /*device*/) {
  return nullptr;
}

} // namespace tessera::train
