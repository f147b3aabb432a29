// What `tessera doctor` tries out. Apart from its flags: a source that reads
// both CLI11 and LibTorch takes the compiler twice as long.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::cli {

/// The flag that makes a doctor one of the two ranks that a doctor starts.
inline constexpr const char* kAsRank = "--as-rank";

/// What is installed.
struct Installation {
  std::string version; // of Tessera
  std::string libtorch_version;
  std::string libtorch_folder;
  int64_t cores = 0;
  int64_t cuda_devices = 0;
  bool has_nccl = false;
  std::string neighbours; // whether other users of the host are kept out
};

Installation find_installation();

/// One thing that was tried out.
struct CheckResult {
  std::string name;
  bool works = false;
  std::string text; // what there is to say of it, or the error
  std::string fix; // what to do if it does not work
};

/// Tries out everything that a run needs, one thing after the other; `tell`
/// gets each result as soon as it is known.
std::vector<CheckResult> try_out_everything(
    const std::function<void(const CheckResult&)>& tell);

/// Makes one all-reduce. Returns the exit code.
int be_a_rank_of_the_diagnosis();

} // namespace tessera::cli
