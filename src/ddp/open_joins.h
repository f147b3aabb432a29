// Whether this process trains with uneven inputs at the moment.
#pragma once

namespace tessera::ddp {

/// A Join that is enabled is open: ranks that have no more inputs shadow the
/// collectives of the others, which announce each iteration on the host.
bool is_any_join_open();

} // namespace tessera::ddp
