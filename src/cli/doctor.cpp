#include <CLI/CLI.hpp>

#include <memory>

#include "cli/commands.h"
#include "cli/diagnosis.h"

namespace tessera::cli {

Action add_doctor(CLI::App& app) {
  auto* command = app.add_subcommand(
      "doctor", "Check the installation and say how to fix problems");
  auto as_rank = std::make_shared<bool>(false);
  // For the doctor's own use, so not in the help.
  command->add_flag(kAsRank, *as_rank)->group("");
  return [as_rank] {
    return *as_rank ? be_a_rank_of_the_diagnosis() : diagnose();
  };
}

} // namespace tessera::cli
