#include "engine/face_meta.h"

#include <tessera/error.h>

#include <string_view>

#include "engine/gather_node.h"
#include "engine/unit.h"

namespace tessera::engine {

void FaceMeta::refuse() const {
  const auto* node = dynamic_cast<const GatherNode*>(grad_fn_.get());
  raise(
      {.call = "grad",
       .unit = node == nullptr ? std::string_view() : node->unit().name(),
       .parameter = parameter_},
      "this reads the gradient of a sharded parameter, of which each rank has a part. "
      "An optimizer must be made after fully_shard, of tessera::parameters(model): one that was made before would train nothing. "
      "Clip with tessera::clip_grad_norm_(model, max_norm). "
      "Read a rank's part through tessera::parameters(model), the whole gradient inside summon_full_params with with_grads(true).");
}

} // namespace tessera::engine
