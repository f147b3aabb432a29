#include "cli/command_page.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <utility>

namespace tessera::cli {
namespace {

/// CLI11 writes a type as "TEXT:{flat,dim0}" or "UINT:POSITIVE".
void read_type(const CLI::Option& option, OptionPage& page) {
  const std::string type = option.get_type_name();
  page.value = type.substr(0, type.find(':'));
  const size_t begin = type.find(":{");
  if (begin == std::string::npos || !type.ends_with('}')) {
    return;
  }
  const std::string list = type.substr(begin + 2, type.size() - begin - 3);
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    page.choices.push_back(list.substr(at, end - at));
    at = end + 1;
  }
}

OptionPage page_of(const CLI::Option& option) {
  OptionPage page{.text = option.get_description()};
  if (option.get_positional()) {
    page.names.push_back(option.get_single_name());
  }
  for (const auto& name : option.get_snames()) {
    page.names.push_back("-" + name);
  }
  for (const auto& name : option.get_lnames()) {
    page.names.push_back("--" + name);
  }
  if (option.get_items_expected_max() > 0) {
    read_type(option, page);
  }
  return page;
}

CommandPage page_below(const CLI::App& app, std::vector<std::string> words) {
  words.push_back(app.get_name());
  CommandPage page{
      .words = std::move(words),
      .text = app.get_description(),
      .footer = app.get_footer()};
  page.usage = page.name(" ") + " [OPTIONS]";
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) {
      continue; // hidden
    }
    if (!option->get_positional()) {
      page.options.push_back(page_of(*option));
      continue;
    }
    page.positionals.push_back(page_of(*option));
    const std::string name = option->get_single_name();
    page.usage += option->get_required() ? " " + name : " [" + name + "]";
    page.usage += option->get_items_expected_max() > 1 ? "..." : "";
  }
  for (const CLI::App* command : app.get_subcommands({})) {
    if (!command->get_group().empty()) {
      page.commands.push_back(page_below(*command, page.words));
    }
  }
  page.usage += page.commands.empty() ? "" : " COMMAND ...";
  return page;
}

void add_pages(
    const CommandPage& page,
    std::vector<const CommandPage*>& pages) {
  pages.push_back(&page);
  for (const CommandPage& command : page.commands) {
    add_pages(command, pages);
  }
}

} // namespace

std::string CommandPage::name(const std::string& between) const {
  std::string result;
  for (const std::string& word : words) {
    result += (result.empty() ? "" : between) + word;
  }
  return result;
}

CommandPage page_of(const CLI::App& app) {
  return page_below(app, {});
}

std::vector<const CommandPage*> all_pages(const CommandPage& page) {
  std::vector<const CommandPage*> pages;
  add_pages(page, pages);
  return pages;
}

} // namespace tessera::cli
