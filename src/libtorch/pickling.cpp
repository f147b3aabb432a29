#include "libtorch/pickling.h"

#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"

namespace tessera::libtorch {
namespace {

using Metadata = std::unordered_map<std::string, bool>;

struct PicklingChecks {
  Mutex mutex;
  std::vector<PicklingCheck> checks TESSERA_GUARDED_BY(mutex);
};

PicklingChecks& pickling_checks() {
  static auto& all =
      *new PicklingChecks; // never destroyed: others may save late
  return all;
}

void run_pickling_checks(const at::Tensor& tensor, Metadata& /*result*/) {
  std::vector<PicklingCheck> checks;
  {
    PicklingChecks& all = pickling_checks();
    const MutexLock lock(all.mutex);
    checks = all.checks;
  }
  for (const PicklingCheck check : checks) {
    check(tensor);
  }
}

} // namespace

void check_before_pickling(PicklingCheck check) {
  PicklingChecks& all = pickling_checks();
  const MutexLock lock(all.mutex);
  if (std::ranges::find(all.checks, check) != all.checks.end()) {
    return;
  }
  all.checks.push_back(check);
  auto& functions = torch::jit::GetBackendMetaSerialization();
  for (const auto device : {at::kCPU, at::kCUDA, at::kMeta}) {
    auto& function = functions[static_cast<size_t>(device)];
    if (!function) {
      function.emplace(
          run_pickling_checks, [](const at::Tensor&, Metadata&) {});
    }
  }
}

} // namespace tessera::libtorch
