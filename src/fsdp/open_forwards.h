// The forwards that are under way, as far as anybody tells.
#pragma once

#include "engine/unit.h"

namespace tessera::fsdp {

/// A forward of the unit's module runs between these two calls. Told by those
/// who can tell; a plain call of forward() leaves no trace. The caller keeps
/// the unit alive in between. Any thread may call.
void enter_forward(const engine::Unit& unit);
void leave_forward(const engine::Unit& unit);

/// True if such a forward is under way in this unit, above or below it.
bool in_forward(const engine::Unit& unit);

} // namespace tessera::fsdp
