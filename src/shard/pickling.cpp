#include "shard/pickling.h"

#include <tessera/error.h>

#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "shard/deferred_tensor.h"
#include "shard/owners.h"
#include "shard/unit.h"

namespace tessera::shard {
namespace {

using Metadata = std::unordered_map<std::string, bool>;

void refuse_without_values(const at::Tensor& tensor, Metadata& /*result*/) {
  if (find_deferred(tensor) != nullptr) {
    raise({.call = "torch::save"}, kNoValues);
  }
  const Unit* unit = unit_of(tensor);
  if (unit != nullptr && tensor.numel() != 0 &&
      storage_of(tensor)->nbytes() == 0) {
    raise(
        {.call = "torch::save", .unit = unit->name()},
        "raw access to a sharded parameter, which has no memory of its own now. Save inside tessera::summon_full_params(module), or take tessera::state_dict(module).");
  }
}

} // namespace

void guard_pickling() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto& functions = torch::jit::GetBackendMetaSerialization();
    for (const auto device : {at::kCPU, at::kCUDA, at::kMeta}) {
      auto& slot = functions[static_cast<size_t>(device)];
      if (!slot) {
        slot.emplace(
            refuse_without_values, [](const at::Tensor&, Metadata&) {});
      }
    }
  });
}

} // namespace tessera::shard
