#include "comm/backends/carrier.h"

#include <tessera/error.h>

namespace tessera::comm {

void Carrier::give_up(const std::string& /*reason*/) {
  backend()->abort();
}

WorkPtr Carrier::send(const Call&, const at::Tensor&, int, int, bool) {
  TESSERA_INTERNAL_ASSERT(false, "this backend carries no messages");
}

WorkPtr Carrier::recv(const Call&, const at::Tensor&, int, int, bool) {
  TESSERA_INTERNAL_ASSERT(false, "this backend carries no messages");
}

WorkPtr Carrier::all_to_all_pieces(
    const Call&,
    const std::vector<Tensors>&,
    const std::vector<Tensors>&) {
  TESSERA_INTERNAL_ASSERT(false, "this backend shares no memory");
}

at::Tensor Carrier::allocate_shared(at::IntArrayRef, at::ScalarType) {
  TESSERA_INTERNAL_ASSERT(false, "this backend shares no memory");
}

} // namespace tessera::comm
