// The subcommands of `tessera ckpt`.
#pragma once

#include "cli/commands.h"

namespace tessera::cli {

/// Exit codes beside 0 (done, sound, the same) and 1 (damaged, different).
struct CkptExit {
  static constexpr int kCannotDoIt = 2;
  static constexpr int kUnsupported = 3;
};

// Those that read: ckpt_read.cpp.
Action add_inspect(CLI::App& app);
Action add_verify(CLI::App& app);
Action add_diff(CLI::App& app);

// Those that write: ckpt_write.cpp.
Action add_convert(CLI::App& app);
Action add_consolidate(CLI::App& app);
Action add_reshard(CLI::App& app);

} // namespace tessera::cli
