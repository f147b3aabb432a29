// The model that a request describes.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/request.h"

namespace tessera::plan {

/// Reads the checkpoint's metadata if the request names a checkpoint, but no
/// data. Adds a note for each value that the request left open. Throws
/// PlanError, FileError.
Subject subject_of(const Request& request, std::vector<std::string>& notes);

} // namespace tessera::plan
