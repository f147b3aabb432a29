// A command as `--help` shows it, as plain values: man pages and completions
// are made of these, so that they never differ from the help.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

struct OptionPage {
  std::vector<std::string>
      names; // "-n", "--nproc-per-node"; one for positionals
  std::string value; // "INT", "REGEX"; empty for a flag
  std::vector<std::string> choices; // all values there are; empty: any
  std::string text;
};

struct CommandPage {
  std::vector<std::string> words; // "tessera", "ckpt", "inspect"
  std::string text;
  std::string usage; // "tessera ckpt inspect [OPTIONS] PATH"
  std::vector<OptionPage> positionals;
  std::vector<OptionPage> options;
  std::string footer; // exit codes and examples
  std::vector<CommandPage> commands; // below this one

  std::string name(const std::string& between) const;
};

/// The command and all commands below it; what is not in the help is left out.
CommandPage page_of(const CLI::App& app);

/// `page` and all pages below it, parents first.
std::vector<const CommandPage*> all_pages(const CommandPage& page);

/// In roff, for man(1). `version` stands in the page's last line.
std::string man_page(const CommandPage& page, const std::string& version);

/// A script that `source` gives to bash.
std::string bash_completion(const CommandPage& root);
/// A function for a folder of zsh's $fpath, named _tessera there.
std::string zsh_completion(const CommandPage& root);

} // namespace tessera::cli
