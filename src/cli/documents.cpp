// `tessera completion` and `tessera man`: what a shell and man(1) know of the
// command line.
#include <tessera/version.h>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/command_page.h"
#include "cli/commands.h"
#include "state/nearest.h"

namespace tessera::cli {
namespace {

std::string version_text() {
  return std::string("tessera ") + version();
}

void write_man_pages(
    const CommandPage& root,
    const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  for (const CommandPage* page : all_pages(root)) {
    const auto path = folder / (page->name("-") + ".1");
    std::ofstream file(path);
    file << man_page(*page, version_text());
    if (!file.flush()) {
      throw std::runtime_error("\"" + path.string() + "\" cannot be written");
    }
  }
}

const CommandPage& find_page(
    const CommandPage& root,
    const std::vector<std::string>& words) {
  const CommandPage* page = &root;
  for (const std::string& word : words) {
    std::vector<std::string> names;
    const CommandPage* found = nullptr;
    for (const CommandPage& command : page->commands) {
      names.push_back(command.words.back());
      found = command.words.back() == word ? &command : found;
    }
    if (found == nullptr) {
      throw std::runtime_error(
          "there is no command \"" + page->name(" ") + " " + word + "\"." +
          state::did_you_mean(word, names));
    }
    page = found;
  }
  return *page;
}

/// On a terminal by man(1), where there is one; elsewhere as roff, for man(1).
void show(const std::string& page) {
  if (isatty(STDOUT_FILENO) != 0) {
    std::signal(SIGPIPE, SIG_IGN); // a shell without man(1) reads nothing
    if (FILE* reader = popen("man -l - 2>/dev/null", "w")) {
      std::fwrite(page.data(), 1, page.size(), reader);
      if (pclose(reader) == 0) {
        return;
      }
    }
  }
  std::cout << page;
}

} // namespace

Action add_completion(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  auto* command = app.add_subcommand(
      "completion", "Print a script that completes commands and options");
  command->add_option("SHELL", *shell, "bash or zsh")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}));
  command->footer(
      "bash: source <(tessera completion bash)\n"
      "zsh:  tessera completion zsh > FOLDER/_tessera, for a FOLDER of $fpath");
  return [&app, shell] {
    const CommandPage root = page_of(app);
    std::cout
        << (*shell == "bash" ? bash_completion(root) : zsh_completion(root));
    return 0;
  };
}

Action add_man(CLI::App& app) {
  struct Settings {
    std::vector<std::string> words;
    std::string folder;
  };
  auto settings = std::make_shared<Settings>();
  auto* command =
      app.add_subcommand("man", "Show the manual page of a command");
  command->add_option("COMMAND", settings->words, "For example: ckpt inspect");
  command->add_option(
      "--write", settings->folder, "Write all pages into this folder instead");
  command->footer(
      "A terminal shows the page as man does; a pipe or a file gets its source.");
  return [&app, settings] {
    const CommandPage root = page_of(app);
    if (!settings->folder.empty()) {
      write_man_pages(root, settings->folder);
      return 0;
    }
    show(man_page(find_page(root, settings->words), version_text()));
    return 0;
  };
}

} // namespace tessera::cli
