#include <algorithm>

#include "cli/command_page.h"

namespace tessera::cli {
namespace {

/// Text as roff prints it: hyphens stay hyphens, and no line is a request.
std::string roff(const std::string& text) {
  std::string result;
  bool begins_line = true;
  for (const char c : text) {
    if (begins_line && (c == '.' || c == '\'')) {
      result += "\\&";
    }
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
    begins_line = c == '\n';
  }
  return result;
}

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return static_cast<char>(std::toupper(c));
  });
  return text;
}

std::string option_entry(const OptionPage& option) {
  std::string heading;
  for (const std::string& name : option.names) {
    heading += (heading.empty() ? "\\fB" : ", \\fB") + roff(name) + "\\fR";
  }
  if (!option.value.empty() && option.names[0].starts_with("-")) {
    heading += " \\fI" + roff(option.value) + "\\fR";
  }
  std::string entry = ".TP\n" + heading + "\n" + roff(option.text) + "\n";
  if (!option.choices.empty()) {
    entry += ".br\nOne of:";
    for (const std::string& choice : option.choices) {
      entry += " " + roff(choice);
    }
    entry += "\n";
  }
  return entry;
}

std::string option_entries(
    const char* heading,
    const std::vector<OptionPage>& options) {
  std::string section;
  for (const OptionPage& option : options) {
    section += option_entry(option);
  }
  return section.empty() ? "" : std::string(".SH ") + heading + "\n" + section;
}

} // namespace

std::string man_page(const CommandPage& page, const std::string& version) {
  std::string text = ".TH " + upper(page.name("\\-")) + " 1 \"\" \"" +
      roff(version) + "\" \"Tessera\"\n";
  text +=
      ".SH NAME\n" + roff(page.name("-")) + " \\- " + roff(page.text) + "\n";
  text += ".SH SYNOPSIS\n\\fB" + roff(page.usage) + "\\fR\n";
  text += option_entries("ARGUMENTS", page.positionals);
  text += option_entries("OPTIONS", page.options);
  if (!page.commands.empty()) {
    text += ".SH COMMANDS\n";
    for (const CommandPage& command : page.commands) {
      text += ".TP\n\\fB" + roff(command.name("-")) + "\\fR(1)\n" +
          roff(command.text) + "\n";
    }
  }
  if (!page.footer.empty()) {
    text += ".SH NOTES\n.nf\n" + roff(page.footer) + "\n.fi\n";
  }
  return text;
}

} // namespace tessera::cli
