// `tessera ckpt`: inspects, verifies, converts and compares checkpoints.
#include <CLI/CLI.hpp>

#include <exception>
#include <iostream>
#include <map>
#include <string>

#include "cli/ckpt_commands.h"
#include "cli/interrupts.h"

namespace tessera::cli {

Action add_ckpt(CLI::App& app) {
  auto* command = app.add_subcommand(
      "ckpt", "Inspect, verify, compare and convert checkpoints");
  command->require_subcommand(1);
  const std::map<std::string, Action> actions{
      {"inspect", add_inspect(*command)},
      {"verify", add_verify(*command)},
      {"convert", add_convert(*command)},
      {"diff", add_diff(*command)},
      {"consolidate", add_consolidate(*command)},
      {"reshard", add_reshard(*command)}};
  return [command, actions] {
    const std::string name = command->get_subcommands().front()->get_name();
    try {
      return actions.at(name)();
    } catch (const Interrupted& interrupted) {
      std::cerr << "tessera ckpt " << name
                << ": interrupted; nothing was written\n";
      end_by(interrupted);
    } catch (const std::exception& error) {
      std::cerr << "tessera ckpt " << name << ": " << error.what() << "\n";
      return CkptExit::kCannotDoIt;
    }
  };
}

} // namespace tessera::cli
