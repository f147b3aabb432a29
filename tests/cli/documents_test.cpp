// `tessera completion` and `tessera man`.
#include <filesystem>
#include <regex>
#include <set>

#include "checkpoint/disk/scratch_folder.h"
#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using checkpoint::ScratchFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::string printed(const std::vector<std::string>& command) {
  const auto result = run_command(command);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return result.output;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

/// What bash offers after `words`, the last of which is being typed.
std::vector<std::string> bash_offers(const std::string& words) {
  return lines_of(printed(
      {"bash",
       "-c",
       "eval \"$(" + tessera_program() + " completion bash)\"; COMP_WORDS=(" +
           words +
           "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _tessera; "
           "printf '%s\\n' \"${COMPREPLY[@]}\""}));
}

TEST(CompletionTest, BashOffersCommandsOptionsAndChoices) {
  EXPECT_THAT(bash_offers("tessera do"), ElementsAre("doctor"));
  EXPECT_THAT(bash_offers("tessera ckpt ins"), ElementsAre("inspect"));
  EXPECT_THAT(bash_offers("tessera doctor --j"), ElementsAre("--json"));
  EXPECT_THAT(bash_offers("tessera plan --layout d"), ElementsAre("dim0"));
  EXPECT_THAT(bash_offers("tessera plan --layout = d"), ElementsAre("dim0"));
  EXPECT_THAT(
      bash_offers("tessera ckpt ''"),
      IsSupersetOf({"inspect", "verify", "convert"}));
}

TEST(CompletionTest, BashOffersFilesWhereFilesAreMeant) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder / "step_40");
  EXPECT_THAT(
      bash_offers("tessera ckpt inspect " + (folder / "st").string()),
      ElementsAre((folder / "step_40").string()));
}

/// The line that zsh itself makes of `typed` and a tab, on a terminal of its
/// own.
std::string zsh_completes(const std::string& typed) {
  const ScratchFolder folder;
  const std::string script = (folder / "_tessera").string();
  printed({"bash", "-c", tessera_program() + " completion zsh > " + script});
  // Ctrl-X shows the line. What is typed is echoed, so the words that are
  // waited for must not stand in it as they are printed.
  return printed(
      {"zsh",
       "-fc",
       "zmodload zsh/zpty; zpty shell exec zsh -fi; "
       "zpty -w shell 'fpath=(" +
           folder.path().string() +
           R"( $fpath); autoload -U compinit; compinit -u -D
show() { print -r -- "LI""NE:$BUFFER:" }; zle -N show; bindkey "^X" show
print RE""ADY'; zpty -r shell seen '*READY*'
zpty -wn shell ')" +
           typed +
           R"('$'\t\x18'; zpty -r shell seen '*LINE:*:*'
print -r -- ${${seen#*LINE:}%%:*}
zpty -w shell $'\x15exit'; while zpty -r shell seen; do :; done; :)"});
}

TEST(CompletionTest, ZshCompletes) {
  EXPECT_THAT(zsh_completes("tessera doc"), HasSubstr("tessera doctor"));
  EXPECT_THAT(
      zsh_completes("tessera plan --layout=d"), HasSubstr("--layout=dim0"));
  EXPECT_THAT(
      zsh_completes("tessera ckpt insp"), HasSubstr("tessera ckpt inspect"));
}

TEST(ManTest, EachCommandHasAPageThatMandocTakes) {
  const ScratchFolder folder;
  printed({tessera_program(), "man", "--write", folder.path().string()});
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.insert(entry.path().filename());
    // Pages have no date: the same sources give the same pages.
    const auto lint = run_command(
        {"mandoc", "-T", "lint", "-W", "warning", entry.path().string()});
    for (const auto& problem : lines_of(lint.output)) {
      EXPECT_THAT(problem, HasSubstr("missing date"));
    }
  }
  EXPECT_THAT(
      names,
      IsSupersetOf(
          {"tessera.1",
           "tessera-run.1",
           "tessera-ckpt-inspect.1",
           "tessera-plan.1"}));
}

/// The page is made from what `--help` is made from.
TEST(ManTest, APageHasEveryOptionOfTheHelp) {
  const std::string help = printed({tessera_program(), "plan", "--help"});
  const std::string page = std::regex_replace(
      printed({tessera_program(), "man", "plan"}), std::regex(R"(\\-)"), "-");
  const std::regex option("--[a-z][a-z0-9-]*");
  int found = 0;
  for (std::sregex_iterator at(help.begin(), help.end(), option), end;
       at != end;
       ++at, ++found) {
    EXPECT_THAT(page, HasSubstr(at->str()));
  }
  EXPECT_GT(found, 20);
}

TEST(ManTest, AnUnknownCommandIsNamed) {
  const auto result =
      run_command({tessera_program(), "man", "ckpt", "inpsect"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      HasSubstr("there is no command \"tessera ckpt inpsect\". Did you mean"));
}

} // namespace
} // namespace tessera
