#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace tessera::launch {

/// Name of the folder below `log_dir` that takes the logs of this launch:
/// "launch_2026-11-16T09-15-00Z", by the time of node 0. Where there is a
/// `log_dir` the folder is made, and the name is one that no launch had before.
std::string new_launch_name(
    const std::optional<std::filesystem::path>& log_dir);

/// Makes `log_dir`/latest a link to the folder `name` beside it. Returns what
/// went wrong, or nothing.
std::string point_latest_at(
    const std::filesystem::path& log_dir,
    const std::string& name);

} // namespace tessera::launch
