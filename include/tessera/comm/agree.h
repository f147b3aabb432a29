#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

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

} // namespace tessera
