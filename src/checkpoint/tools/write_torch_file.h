// Content as a file of torch.save().
#pragma once

#include "checkpoint/disk/files.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/progress_meter.h"
#include "checkpoint/tools/target_options.h"

namespace tessera::checkpoint {

/// A nested dictionary for torch.load(weights_only=True).
/// Throws FileError; the file appears complete or not at all.
void write_torch_file(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress);

} // namespace tessera::checkpoint
