// Content as a DCP folder.
#pragma once

#include "checkpoint/disk/files.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress_meter.h"
#include "checkpoint/tools/target_options.h"

namespace tessera::checkpoint {

/// A folder as `world` ranks would save it: rows of dim 0 divided evenly.
/// Throws FileError; the folder appears complete or not at all.
void write_dcp(
    const Content& content,
    const fs::path& folder,
    int world,
    const TargetOptions& options,
    ProgressMeter& progress);

} // namespace tessera::checkpoint
