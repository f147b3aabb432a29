// The process that started this rank.
#pragma once

#include <string>

namespace tessera::comm {

/// Identifies the process that started this rank and the other ranks of this
/// host, with the same text on each rank: for PMI launchers, which give no job
/// id. That process is the nearest ancestor that is not part of this rank; a
/// shell or a wrapper between the launcher and the program has the rank's own
/// PMI_RANK and is passed over. Empty if /proc does not tell.
std::string pmi_launcher_identity();

} // namespace tessera::comm
