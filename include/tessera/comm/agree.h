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
/// text names `call`, the first line that differs, and which rank has which.
/// Costs one 16-byte exchange if all agree. Collective.
TESSERA_API void agree(
    const Group& group,
    std::string_view call,
    const std::vector<std::string>& items);

/// For errors that only some ranks see (such as a file that one of them cannot
/// open): throws on every rank if any rank passes an error, naming the ranks
/// and their errors. Collective.
TESSERA_API void fail_together(
    const Group& group,
    std::string_view call,
    const std::optional<std::string>& error);

/// Throws DisagreementError on every rank, with the numbers that the ranks
/// have, unless all pass the same `step`. Call it at the beginning of a
/// training step, before its first collective:
///
///   for (int64_t batch = 0; batch < count; ++batch) {
///     tessera::step_token(batch);
///     ...
///
/// Without this check, a rank that skipped a batch (it caught an exception and
/// continued) would train its next batch together with the current one of the
/// other ranks until the end, and nothing else would reveal it. Costs one
/// exchange of 8 bytes per rank: some microseconds over shared memory. Without
/// a group, over the world. Collective.
TESSERA_API void step_token(int64_t step, const Group& group = Group());

} // namespace tessera
