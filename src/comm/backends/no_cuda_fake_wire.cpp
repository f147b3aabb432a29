#include <tessera/error.h>

#include "comm/backends/fake_wire.h"

namespace tessera::comm {

std::unique_ptr<FakeWire> make_cuda_wire(const WireSpeed& /*speed*/) {
  raise(
      {.call = "collective"},
      "this build cannot pretend to have a network for GPU tensors: CUDA's headers were not found when Tessera was configured. Leave out fake_bandwidth and fake_latency.");
}

} // namespace tessera::comm
