#include <tessera/version.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"Tessera: sharded data-parallel training on LibTorch"};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag(
      "--version",
      std::string("tessera ") + tessera::version() + " (LibTorch " +
          tessera::libtorch_version() + ")");
  app.get_formatter()->column_width(34);

  const std::map<std::string, tessera::cli::Action> actions{
      {"run", tessera::cli::add_run(app)},
      {"doctor", tessera::cli::add_doctor(app)},
      {"ckpt", tessera::cli::add_ckpt(app)},
      {"plan", tessera::cli::add_plan(app)},
      {"report", tessera::cli::add_report(app)}};
  try {
    std::vector<std::string> words(argv + 1, argv + argc);
    tessera::cli::drop_separator(words);
    std::reverse(words.begin(), words.end()); // as CLI11 wants them
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return actions.at(app.get_subcommands().front()->get_name())();
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 1;
  }
}
