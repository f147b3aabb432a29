#include <set>

#include "cli/command_page.h"

namespace tessera::cli {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

std::vector<std::string> option_names(const CommandPage& page) {
  std::vector<std::string> names;
  for (const OptionPage& option : page.options) {
    names.insert(names.end(), option.names.begin(), option.names.end());
  }
  return names;
}

std::vector<std::string> command_names(const CommandPage& page) {
  std::vector<std::string> names;
  for (const CommandPage& command : page.commands) {
    names.push_back(command.words.back());
  }
  return names;
}

/// "tessera plan --strategy"|"tessera plan --layout", for a case of bash.
std::string patterns(const CommandPage& page, const OptionPage& option) {
  std::string text;
  for (const std::string& name : option.names) {
    text += (text.empty() ? "\"" : "|\"") + page.name(" ") + " " + name + "\"";
  }
  return text;
}

/// What may follow an option that has a value: its choices, or a file.
std::string bash_values(const CommandPage& root) {
  std::string text;
  for (const CommandPage* page : all_pages(root)) {
    for (const OptionPage& option : page->options) {
      if (option.value.empty()) {
        continue;
      }
      text += "    " + patterns(*page, option) + ")\n      ";
      text += option.choices.empty()
          ? "COMPREPLY=($(compgen -f -- \"$current\"))"
          : "COMPREPLY=($(compgen -W \"" + joined(option.choices) +
              "\" -- \"$current\"))";
      text += "\n      return ;;\n";
    }
  }
  return text;
}

/// Text inside of single quotes of zsh, where ':' and brackets mean something.
std::string zsh_quoted(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else if (c == '\n') {
      result += ' ';
    } else {
      const bool is_special = c == '[' || c == ']' || c == ':' || c == '\\';
      result += is_special ? std::string("\\") + c : std::string(1, c);
    }
  }
  return result;
}

std::string zsh_option(const OptionPage& option) {
  std::string lines;
  const std::string value = option.value.empty() ? ""
      : option.choices.empty()
      ? ":" + zsh_quoted(option.value) + ":_files"
      : ":" + zsh_quoted(option.value) + ":(" + joined(option.choices) + ")";
  for (const std::string& name : option.names) {
    // "=" lets a long option's value follow it or stand in the same word.
    const bool is_long = name.starts_with("--") && !option.value.empty();
    lines += " \\\n    '*" + name + (is_long ? "=" : "") + "[" +
        zsh_quoted(option.text) + "]" + value + "'";
  }
  return lines;
}

std::string zsh_function(const CommandPage& page) {
  std::string text = "_" + page.name("_") + "() {\n";
  std::string options;
  for (const OptionPage& option : page.options) {
    options += zsh_option(option);
  }
  if (page.commands.empty()) {
    const char* rest =
        page.positionals.empty() ? "" : " \\\n    '*:file:_files'";
    return text + "  _arguments" + options + rest + "\n}\n\n";
  }
  text += "  local state\n  local -a commands=(\n";
  for (const CommandPage& command : page.commands) {
    text +=
        "    '" + command.words.back() + ":" + zsh_quoted(command.text) + "'\n";
  }
  text += "  )\n  _arguments -C" + options +
      " \\\n    '1: :->command' \\\n    '*:: :->rest'\n";
  text +=
      "  case $state in\n    command) _describe command commands ;;\n"
      "    rest)\n      case $words[1] in\n";
  for (const CommandPage& command : page.commands) {
    text +=
        "        " + command.words.back() + ") _" + command.name("_") + " ;;\n";
  }
  return text + "      esac ;;\n  esac\n}\n\n";
}

} // namespace

std::string bash_completion(const CommandPage& root) {
  std::string paths;
  std::string words;
  for (const CommandPage* page : all_pages(root)) {
    if (page != &root) {
      paths += (paths.empty() ? "\"" : "|\"") + page->name(" ") + "\"";
    }
    words += "    \"" + page->name(" ") + "\")\n      commands=\"" +
        joined(command_names(*page)) + "\"\n      options=\"" +
        joined(option_names(*page)) + "\" ;;\n";
  }
  return "# Completion of `tessera` for bash, made by `tessera completion bash`.\n"
         "_tessera() {\n"
         "  local current=\"${COMP_WORDS[COMP_CWORD]}\"\n"
         "  local before=\"${COMP_WORDS[COMP_CWORD - 1]}\"\n"
         "  local path=tessera commands= options= i\n"
         "  # --option=value comes as three words.\n"
         "  [[ $before == \"=\" ]] && before=\"${COMP_WORDS[COMP_CWORD - 2]}\"\n"
         "  [[ $current == \"=\" ]] && current=\n"
         "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
         "    case \"$path ${COMP_WORDS[i]}\" in\n"
         "    " +
      paths +
      ")\n"
      "      path=\"$path ${COMP_WORDS[i]}\" ;;\n"
      "    esac\n"
      "  done\n"
      "  case \"$path $before\" in\n" +
      bash_values(root) +
      "  esac\n"
      "  case \"$path\" in\n" +
      words +
      "  esac\n"
      "  if [[ $current == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$current\"))\n"
      "  elif [[ -n $commands ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$commands\" -- \"$current\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$current\"))\n"
      "  fi\n"
      "}\n"
      "complete -o filenames -F _tessera tessera\n";
}

std::string zsh_completion(const CommandPage& root) {
  std::string text =
      "#compdef tessera\n"
      "# Completion of `tessera` for zsh, made by `tessera completion zsh`.\n\n";
  for (const CommandPage* page : all_pages(root)) {
    text += zsh_function(*page);
  }
  return text + "_tessera \"$@\"\n";
}

} // namespace tessera::cli
