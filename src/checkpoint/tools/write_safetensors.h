// Content as safetensors.
#pragma once

#include "checkpoint/disk/files.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress_meter.h"
#include "checkpoint/tools/target_options.h"

namespace tessera::checkpoint {

/// A file if `path` ends with ".safetensors", else a folder.
/// Throws FileError; the file or folder appears complete or not at all.
void write_safetensors(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress);

} // namespace tessera::checkpoint
