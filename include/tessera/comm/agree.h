#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// "Fail on every rank or on none."

/// Throws DisagreementError on every rank unless all pass equal `items` (what
/// a call was given: names, shapes, options, each as one readable line). The
/// text names `call`, the first line that differs, and who has which. One
/// 16-byte exchange when they agree. Collective.
TESSERA_API void agree(
    const Group& group,
    std::string_view call,
    const std::vector<std::string>& items);

/// For what only some ranks can see (a file that one of them cannot open):
/// throws on every rank if any passes an error, naming the ranks and their
/// errors; else returns. Collective.
TESSERA_API void fail_together(
    const Group& group,
    std::string_view call,
    const std::optional<std::string>& error);

/// Throws DisagreementError on every rank, with the numbers that the ranks
/// have, unless all pass the same `step`; else returns. For the begin of a
/// training step, before its first collective:
///
///   for (int64_t batch = 0; batch < count; ++batch) {
///     tessera::step_token(batch);
///     ...
///
/// Without it, a rank that left a batch out (it caught an exception and went
/// on) trains its next batch together with this one of the others, until the
/// end, and nothing else would tell. One exchange of 8 bytes a rank: some
/// microseconds over shared memory. Without a group, over the world.
/// Collective.
TESSERA_API void step_token(int64_t step, const Group& group = Group());

} // namespace tessera
