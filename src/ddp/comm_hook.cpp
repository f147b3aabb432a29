#include <tessera/ddp/comm_hook.h>

#include <memory>

namespace tessera {
namespace {

constexpr const char* kHookLabel = "ddp: gradients";

CommHook compress_hook(const Group& group, at::ScalarType dtype) {
  return [group, dtype](GradBucket& bucket) -> CommFuture {
    // Divides before summing: a sum may be too large for the dtype.
    const at::Tensor wire = (bucket.buffer() / group.size()).to(dtype);
    auto work = std::make_shared<Work>(
        group.all_reduce_async(wire, ReduceOp::Sum, kHookLabel));
    return [work, wire, buffer = bucket.buffer()] {
      work->wait();
      buffer.copy_(wire);
      return buffer;
    };
  };
}

} // namespace

CommHook allreduce_hook(const Group& group) {
  return [group](GradBucket& bucket) -> CommFuture {
    auto work = std::make_shared<Work>(
        group.all_reduce_async(bucket.buffer(), ReduceOp::Avg, kHookLabel));
    return [work, buffer = bucket.buffer()] {
      work->wait();
      return buffer;
    };
  };
}

CommHook fp16_compress_hook(const Group& group) {
  return compress_hook(group, at::kHalf);
}

CommHook bf16_compress_hook(const Group& group) {
  return compress_hook(group, at::kBFloat16);
}

} // namespace tessera
