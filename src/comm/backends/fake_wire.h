// What makes the fake backend's collectives take time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <vector>

#include "comm/backends/carrier.h"
#include "comm/wire_speed.h"

namespace tessera::comm {

/// A collective that is on its way.
struct FakeTransfer {
  c10d::OpType type;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  int64_t sent_bytes = 0;
  std::function<void()> move; // what it does to the outputs; may be empty
};

/// What clocks can count with.
constexpr double kLongestTransfer = 24 * 3600; // seconds

class FakeWire {
 public:
  virtual ~FakeWire() = default;
  virtual WorkPtr carry(FakeTransfer transfer) = 0;
};

/// Collectives take the time that they would take on a network, one after
/// another. They use no processor time: a thread that waits for one sleeps.
std::unique_ptr<FakeWire> make_host_wire(const WireSpeed& speed);

/// The same for GPU tensors, in the manner of NCCL: collectives run on a stream
/// of their own per GPU, and wait() makes the current stream wait. While the
/// wire takes its time, another stream copies this rank's part to where the
/// other ranks' parts would arrive. Unlike NCCL's collectives, these occupy one
/// thread of one multiprocessor, and the copy takes memory bandwidth. The GPU's
/// timer counts nanoseconds, whatever its clocks do. Throws in a build without
/// CUDA's headers, carry() where NVRTC cannot compile what sleeps.
std::unique_ptr<FakeWire> make_cuda_wire(const WireSpeed& speed);

} // namespace tessera::comm
