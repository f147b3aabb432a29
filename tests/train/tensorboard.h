// Event files as TensorBoard itself reads them.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

#include "support/command.h"

namespace tessera::testing {

/// The environment that scripts/fetch_tensorboard.sh makes.
inline std::filesystem::path tensorboard_python() {
  return std::filesystem::path(TESSERA_TENSORBOARD) / "bin" / "python";
}

/// {"curves": {TAG: [[STEP, VALUE], ...]}, "versions": [...]} of a folder or a
/// file.
inline nlohmann::json read_with_tensorboard(const std::filesystem::path& path) {
  const auto result = run_command(
      {tensorboard_python().string(),
       "-E",
       "-W",
       "ignore",
       TESSERA_READ_EVENTS,
       path.string()},
      {.timeout = std::chrono::seconds(300)});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  // What the packages say on stderr comes first.
  const auto begin = result.output.rfind("\n{");
  const auto found = nlohmann::json::parse(
      begin == std::string::npos ? result.output
                                 : result.output.substr(begin + 1),
      nullptr,
      /*allow_exceptions=*/false);
  EXPECT_TRUE(found.is_object()) << result.output;
  return found;
}

} // namespace tessera::testing

/// scripts/junit_summary.py allows this outside of CI only.
#define TESSERA_NEEDS_TENSORBOARD()                                           \
  if (!std::filesystem::exists(::tessera::testing::tensorboard_python())) {   \
    GTEST_SKIP() << "no TensorBoard here: `make setup` could not install it"; \
  }
