#include "settings_file.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "settings.h"

namespace gpt {
namespace {

using nlohmann::json;

/// How many letters have to be changed, added or removed.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] =
          a[i] == b[j] ? diagonal : 1 + std::min({diagonal, above, row[j]});
      diagonal = above;
    }
  }
  return row.back();
}

std::string without_comment(const std::string& line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quote == '"' && line[i] == '\\') {
      throw UsageError(
          "the file of settings has an escape in: " + line +
          "\nEscapes in TOML are not supported; use '...' for a backslash, or "
          "JSON.");
    }
    if (quote != 0) {
      quote = line[i] == quote ? 0 : quote;
    } else if (line[i] == '"' || line[i] == '\'') {
      quote = line[i];
    } else if (line[i] == '#') {
      return line.substr(0, i);
    }
  }
  if (quote != 0) {
    throw UsageError(
        "the file of settings has a quote that does not end in: " + line);
  }
  return line;
}

/// The parser would take the last of two values for a name.
json::parser_callback_t refuse_twice() {
  return [seen = std::vector<std::set<std::string>>()](
             int, json::parse_event_t event, json& value) mutable {
    if (event == json::parse_event_t::object_start) {
      seen.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      seen.pop_back();
    } else if (
        event == json::parse_event_t::key &&
        !seen.back().insert(value.get<std::string>()).second) {
      throw UsageError(
          "the file of settings has several values for \"" +
          value.get<std::string>() + "\"; give one.");
    }
    return true;
  };
}

std::vector<CLI::ConfigItem> from_json(std::istream& input) {
  std::vector<CLI::ConfigItem> entries;
  const auto add = [&](std::vector<std::string> parents,
                       const std::string& name,
                       const json& value) {
    CLI::ConfigItem item;
    item.parents = std::move(parents);
    item.name = name;
    item.inputs = {text_of(value)};
    entries.push_back(std::move(item));
  };
  json file;
  try {
    file = json::parse(input, refuse_twice());
  } catch (const json::parse_error& error) {
    throw UsageError(
        std::string("the file of settings is not JSON: ") + error.what());
  }
  for (const auto& [name, value] : file.items()) {
    if (!value.is_object()) {
      add({}, name, value);
      continue;
    }
    for (const auto& [inner_name, inner] : value.items()) {
      add({name}, inner_name, inner);
    }
  }
  return entries;
}

} // namespace

std::string nearest(
    const std::string& name,
    const std::vector<std::string>& names) {
  return *std::min_element(
      names.begin(), names.end(), [&](const auto& a, const auto& b) {
        return distance(name, a) < distance(name, b);
      });
}

std::string text_of(const json& value) {
  return value.is_string()
      ? value.get<std::string>()
      : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    if (!option->get_lnames().empty()) {
      names.push_back(option->get_lnames().front());
    }
  }
  return names;
}

std::vector<CLI::ConfigItem> SettingsFile::from_config(
    std::istream& input) const {
  std::vector<CLI::ConfigItem> entries;
  std::set<std::string> seen;
  const bool is_json = (input >> std::ws).peek() == '{';
  for (auto& item : is_json ? from_json(input) : from_toml(input)) {
    if (item.name == "++" || item.name == "--") {
      check_section(item.parents);
      continue; // begin and end of a section
    }
    std::replace(item.name.begin(), item.name.end(), '_', '-');
    check(item);
    if (item.inputs.size() != 1 || !seen.insert(item.name).second) {
      throw UsageError(
          "the file of settings has several values for \"" + item.name +
          "\"; give one.");
    }
    item.parents.clear();
    entries.push_back(std::move(item));
  }
  return entries;
}

/// CLI11 would end a value at a '#' inside its quotes too.
std::vector<CLI::ConfigItem> SettingsFile::from_toml(
    std::istream& input) const {
  std::stringstream uncommented;
  for (std::string line; std::getline(input, line);) {
    uncommented << without_comment(line) << "\n";
  }
  return CLI::ConfigTOML::from_config(uncommented);
}

void SettingsFile::check_section(const std::vector<std::string>& names) const {
  for (const auto* option : app_.get_options()) {
    if (names.size() == 1 &&
        CLI::detail::to_lower(option->get_group()) ==
            CLI::detail::to_lower(names[0])) {
      return;
    }
  }
  throw UsageError(
      "the file of settings has a section [" + CLI::detail::join(names, ".") +
      "], which does not exist. Sections are named like the groups of --help.");
}

void SettingsFile::check(const CLI::ConfigItem& item) const {
  const auto names = option_names(app_);
  if (std::find(names.begin(), names.end(), item.name) == names.end()) {
    throw UsageError(
        "the file of settings has \"" + item.fullname() +
        "\", which does not exist. Is \"" + nearest(item.name, names) +
        "\" meant?");
  }
  if (item.parents.empty()) {
    return;
  }
  const auto section = item.parents.back();
  const auto group = app_.get_option("--" + item.name)->get_group();
  if (CLI::detail::to_lower(section) != CLI::detail::to_lower(group)) {
    throw UsageError(
        "the file of settings has \"" + item.name + "\" in [" + section +
        "]; it belongs to [" + CLI::detail::to_lower(group) + "].");
  }
}

} // namespace gpt
