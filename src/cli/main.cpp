#include <tessera/version.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "state/nearest.h"

namespace {

using Actions = std::map<std::string, tessera::cli::Action>;

/// The error for a first word that is not a subcommand; else empty.
std::string unknown_command(
    const std::vector<std::string>& words,
    const Actions& actions) {
  if (words.empty() || words[0].starts_with("-") ||
      actions.contains(words[0])) {
    return {};
  }
  std::vector<std::string> names;
  std::string list;
  for (const auto& [name, action] : actions) {
    names.push_back(name);
    list += (list.empty() ? "" : ", ") + name;
  }
  return "tessera: there is no command \"" + words[0] + "\"." +
      tessera::state::did_you_mean(words[0], names) + " There are " + list +
      "; `tessera COMMAND --help` says more.";
}

/// What is wrong with the words of a command, the nearest word that it knows,
/// and where to look.
std::string explain(const CLI::App* app, const CLI::Error& error) {
  const CLI::App* command = app;
  std::string path = app->get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  std::string text = path + ": ";
  const auto unknown = command->remaining();
  if (unknown.empty()) {
    text += error.what();
  } else {
    std::vector<std::string> known;
    for (const CLI::Option* option : command->get_options()) {
      known.push_back(option->get_name());
    }
    for (const CLI::App* part :
         command->get_subcommands([](const CLI::App*) { return true; })) {
      known.push_back(part->get_name());
    }
    text += "\"" + unknown.front() + "\" was not expected." +
        tessera::state::did_you_mean(unknown.front(), known);
  }
  return text + (text.ends_with(".") || text.ends_with("?") ? "" : ".") + " `" +
      path + " --help` says more.\n";
}

/// The folder that has this program in bin/, or, behind a launcher that finds
/// LibTorch, in libexec/tessera/.
std::filesystem::path installed_prefix() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  const auto folder = program.parent_path();
  const auto prefix = folder.filename() == "bin"
      ? folder.parent_path()
      : folder.parent_path().parent_path();
  if (!std::filesystem::exists(prefix / "include" / "tessera" / "tessera.h")) {
    std::cerr
        << "tessera: " << program
        << " is not installed: run `cmake --install` or `make package`.\n";
    throw CLI::RuntimeError(2);
  }
  return prefix;
}

} // namespace

int main(int argc, char** argv) {
  CLI::App app{"Tessera: sharded data-parallel training on LibTorch"};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag(
      "--version",
      std::string("tessera ") + tessera::version() + " (LibTorch " +
          tessera::libtorch_version() + ")");
  app.add_flag_callback(
      "--prefix",
      [] {
        std::cout << installed_prefix().string() << "\n";
        throw CLI::Success();
      },
      "Print where Tessera is installed, for CMAKE_PREFIX_PATH");
  app.get_formatter()->column_width(34);
  app.failure_message(explain);

  const Actions actions{
      {"run", tessera::cli::add_run(app)},
      {"doctor", tessera::cli::add_doctor(app)},
      {"ckpt", tessera::cli::add_ckpt(app)},
      {"plan", tessera::cli::add_plan(app)},
      {"report", tessera::cli::add_report(app)},
      {"completion", tessera::cli::add_completion(app)},
      {"man", tessera::cli::add_man(app)}};
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) {
    std::cerr << app.help();
    return 2;
  }
  if (const auto text = unknown_command(words, actions); !text.empty()) {
    std::cerr << text << "\n";
    return 2;
  }
  try {
    tessera::cli::drop_separator(words);
    std::reverse(words.begin(), words.end()); // as CLI11 wants them
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    const int code = actions.at(app.get_subcommands().front()->get_name())();
    if (!std::cout.flush()) {
      std::cerr << "tessera: standard output cannot be written to. Is the disk "
                   "full?\n";
      return 2;
    }
    return code;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 1;
  }
}
