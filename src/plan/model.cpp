#include "plan/model.h"

#include "plan/checked.h"

namespace tessera::plan {

int64_t Param::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    numel = times(numel, size);
  }
  return numel;
}

int64_t UnitKind::numel() const {
  int64_t numel = 0;
  for (const Param& param : params) {
    numel = plus(numel, param.numel());
  }
  return numel;
}

int64_t Model::numel() const {
  int64_t numel = 0;
  for (const NamedUnit& unit : units) {
    numel = plus(numel, kinds[unit.kind].numel());
  }
  return numel;
}

int64_t Model::num_params() const {
  int64_t count = 0;
  for (const NamedUnit& unit : units) {
    count += static_cast<int64_t>(kinds[unit.kind].params.size());
  }
  return count;
}

} // namespace tessera::plan
