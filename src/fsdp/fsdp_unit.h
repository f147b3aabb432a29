// What an FSDPUnit holds.
#pragma once

#include <tessera/fsdp/fsdp.h>

#include <memory>

#include "engine/unit.h"

namespace tessera {

struct FSDPUnit::Inner {
  std::shared_ptr<engine::Unit> unit;
};

} // namespace tessera
