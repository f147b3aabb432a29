// Slurm and MPICH, which scripts/fetch_launchers.sh unpacks for the tests.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "support/command.h"

namespace tessera::testing {

/// The folder that the launchers were unpacked into; empty if they could not be
/// fetched.
inline std::filesystem::path launchers_root() {
  const std::filesystem::path root = TESSERA_LAUNCHERS;
  return std::filesystem::exists(root / "packages.txt")
      ? root
      : std::filesystem::path();
}

/// lib/x86_64-linux-gnu, or its name on this processor.
inline std::filesystem::path launchers_libraries() {
  const auto all = launchers_root() / "usr/lib";
  for (const auto& entry : std::filesystem::directory_iterator(all)) {
    if (std::filesystem::exists(entry.path() / "slurm-wlm")) {
      return entry.path();
    }
  }
  return all;
}

/// Lets the programs of the launchers find each other and their libraries.
inline std::map<std::string, std::optional<std::string>> launchers_environment() {
  auto result = without_launcher();
  const char* path = std::getenv("PATH");
  const auto libraries = launchers_libraries();
  result["PATH"] = (launchers_root() / "usr/bin").string() + ":" +
      (path == nullptr ? "/usr/bin:/bin" : path);
  result["LD_LIBRARY_PATH"] =
      libraries.string() + ":" + (libraries / "slurm-wlm").string();
  result["OMP_NUM_THREADS"] = "1";
  return result;
}

} // namespace tessera::testing
