// What a Manager removes or renames when it has saved a step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera::checkpoint {

/// See ManagerOptions.
struct KeptSteps {
  int64_t last = 0; // how many; 0 keeps all
  int64_t every = 0; // keeps multiples; 0 for none
  std::optional<int64_t> protected_step;
};

/// Removes what earlier removals did not finish and what processes that died
/// left behind: unfinished saves, and steps that were being replaced.
void remove_leftovers(const std::filesystem::path& folder);

/// [Note: a run that goes back]
///
/// Steps above the one that was just saved belong to a past that the run has
/// abandoned: it was told to load an older step, or skipped damaged ones. They
/// must no longer be the latest, but they are not ours to remove.
void set_aside_above(const std::filesystem::path& folder, int64_t saved);

/// Removes sound steps that are not to be kept.
void remove_old(const std::filesystem::path& folder, const KeptSteps& kept);

} // namespace tessera::checkpoint
