#include "deferred/replay.h"

#include <tessera/error.h>

#include "deferred/deferred_tensor.h"

namespace tessera::deferred {

at::Tensor replay(const at::Tensor& deferred) {
  const Deferred* found = find_deferred(deferred);
  TESSERA_INTERNAL_ASSERT(found != nullptr, "replay of a tensor with memory");
  const auto tape = found->tape;
  const TensorRef ref = ref_to(deferred);
  return tape->replay({&ref, 1}).front();
}

std::optional<ReplayedPart> replay_part(
    const at::Tensor& deferred,
    int64_t begin,
    int64_t numel) {
  const Deferred* found = find_deferred(deferred);
  TESSERA_INTERNAL_ASSERT(
      found != nullptr, "replay of a part of a tensor with memory");
  const auto tape = found->tape;
  return tape->replay_part(ref_to(deferred), begin, numel);
}

at::Device intended_device(const at::Tensor& deferred) {
  const Deferred* found = find_deferred(deferred);
  TESSERA_INTERNAL_ASSERT(
      found != nullptr, "intended device of a tensor with memory");
  return found->tape->device_of(found->id);
}

} // namespace tessera::deferred
