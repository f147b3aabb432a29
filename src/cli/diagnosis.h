// What `tessera doctor` tries out. Apart from its flags: a source that reads
// both CLI11 and LibTorch takes the compiler twice as long.
#pragma once

namespace tessera::cli {

/// The flag that makes a doctor one of the two ranks that a doctor starts.
inline constexpr const char* kAsRank = "--as-rank";

/// Prints what is installed, what works, and how to mend what does not. Returns
/// the exit code.
int diagnose();

/// Makes one all-reduce. Returns the exit code.
int be_a_rank_of_the_diagnosis();

} // namespace tessera::cli
