#pragma once

namespace tessera::comm {

/// TESSERA_DEBUG_RANK: lets a person attach before anything happens. Throws
/// c10::ValueError if the variable does not name a rank.
void wait_for_debugger_if_asked(int rank, int world_size);

} // namespace tessera::comm
