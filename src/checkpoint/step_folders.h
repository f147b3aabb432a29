// The folders of checkpoints, by their steps, as a Manager finds them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

/// Follows the name of a step that is being replaced: see [Note: replacing a
/// folder].
inline constexpr std::string_view kAside = ".old";

/// "step_00001000".
std::string name_of_step(int64_t step);

/// The names in a folder; nothing if the folder does not exist or no longer
/// exists. Throws CheckpointAccessError.
std::optional<std::vector<std::string>> names_in(
    const std::filesystem::path& folder);

/// A folder at one moment. Another folder of the same name has another
/// identity, and so does a folder that was renamed.
struct FolderIdentity {
  std::filesystem::path path;
  dev_t device = 0;
  ino_t number = 0;
  int64_t seconds = 0; // of its last change
  int64_t nanoseconds = 0;

  bool operator==(const FolderIdentity&) const = default;
};

struct StepFolder {
  int64_t step = 0;
  std::filesystem::path path; // its folder has, or is about to get, this name
  FolderIdentity found; // when it was listed

  bool has_changed() const;
};

/// Checkpoints whose name is exactly that of a step, sorted by step. Includes
/// damaged checkpoints and those that are being replaced.
std::vector<StepFolder> steps_in(const std::filesystem::path& folder);

/// [Note: beside a trainer]
///
/// A trainer may save and remove checkpoints while another process looks for
/// them. A checkpoint that was listed may be gone when it is opened, and a list
/// that is made while entries come and go may lack both the new one and the old
/// one. So a reader that finds a checkpoint changed since it was listed lists
/// again, and an empty list counts only if the folder did not change while the
/// list was made. This may repeat without limit, but each time the trainer has
/// saved another checkpoint.
std::vector<StepFolder> settled_steps_in(const std::filesystem::path& folder);

/// Why a checkpoint cannot be read; empty if it can.
std::string problem_with(const std::filesystem::path& path);
/// Nothing if the checkpoint has been replaced or removed since it was listed.
std::optional<std::string> problem_with(const StepFolder& step);

/// The newest sound checkpoint; -1 if there is none.
int64_t newest_sound(const std::filesystem::path& folder);

} // namespace tessera::checkpoint
