#include "settings_table.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string_view>

#include "kept_settings.h"
#include "settings_file.h"

namespace gpt {
namespace {

using nlohmann::json;

/// Shown also if they have their defaults.
constexpr std::array<std::string_view, 12> kImportant{
    "run",
    "text",
    "tokenizer",
    "layers",
    "heads",
    "width",
    "length",
    "steps",
    "batch",
    "lr",
    "strategy",
    "precision"};

bool is_important(const ShownSetting& setting) {
  return std::find(kImportant.begin(), kImportant.end(), setting.name) !=
      kImportant.end();
}

/// What the settings do not use: the shape of the built-in model, the reading
/// of text.
bool is_unused(const std::string& name, const Settings& settings) {
  const auto is_one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  return (!settings.exported.file.empty() &&
          is_one_of({"layers", "heads", "width", "dropout", "chunked-loss"})) ||
      (!settings.data.tokens.empty() &&
       is_one_of({"text", "text-bytes", "validation", "vocabulary"}));
}

json value_of(const std::string& text) {
  auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return value.is_number() || value.is_boolean() ? value : json(text);
}

ShownSetting shown(const CLI::Option& option) {
  const std::string default_value = option.get_expected_max() == 0
      ? "false" // a flag
      : option.get_default_str();
  ShownSetting setting{
      .group = CLI::detail::to_lower(option.get_group()),
      .name = option.get_lnames().front(),
      .value = option.count() > 0 ? option.results().back() : default_value,
      .default_value = default_value};
  setting.is_default = value_of(setting.value) == value_of(default_value);
  return setting;
}

/// On one line of a terminal, whatever is in it.
std::string printable(const std::string& text) {
  const bool is_plain = !text.empty() &&
      std::all_of(
          text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
  return is_plain
      ? text
      : json(text).dump(-1, ' ', true, json::error_handler_t::replace);
}

} // namespace

std::vector<ShownSetting> table_of(
    const CLI::App& app,
    const Settings& settings,
    const Settings& defaults) {
  const auto kept_ones = kept_settings();
  std::vector<ShownSetting> table;
  for (const auto* option : app.get_options()) {
    if (option->get_lnames().empty() || !option->get_configurable() ||
        option->get_group() == "Other" ||
        is_unused(option->get_lnames().front(), settings)) {
      continue;
    }
    auto& setting = table.emplace_back(shown(*option));
    for (const auto& kept : kept_ones) { // may come from RUN/settings.json
      if (kept.name == setting.name) {
        setting.value = text_of(kept.get(settings));
        setting.is_default = kept.get(settings) == kept.get(defaults);
      }
    }
  }
  return table;
}

std::string json_of(const std::vector<ShownSetting>& table) {
  json groups;
  for (const auto& setting : table) {
    groups[setting.group][setting.name] = value_of(setting.value);
  }
  return text_of(groups);
}

void Settings::choose_length(int64_t chosen) {
  model.length = chosen;
  for (auto& setting : table) {
    if (setting.name == "length") {
      setting.value = std::to_string(chosen);
      setting.is_default = setting.value == setting.default_value;
    }
  }
  json = json_of(table);
}

std::string printed_table(const std::vector<ShownSetting>& table) {
  std::vector<std::array<std::string, 2>> rows;
  std::array<size_t, 2> widths{};
  std::vector<std::string> notes;
  for (const auto& setting : table) {
    if (setting.is_default && !is_important(setting)) {
      continue;
    }
    rows.push_back({setting.name, printable(setting.value)});
    notes.push_back(
        setting.is_default ? ""
                           : "default " + printable(setting.default_value));
    widths[0] = std::max(widths[0], rows.back()[0].size());
    if (!notes.back().empty()) {
      widths[1] = std::max(widths[1], rows.back()[1].size());
    }
  }
  std::string text = "settings:";
  for (size_t i = 0; i < rows.size(); ++i) {
    auto [name, value] = rows[i];
    name.resize(std::max(name.size(), widths[0]), ' ');
    if (!notes[i].empty()) {
      value.resize(std::max(value.size(), widths[1]), ' ');
      value += "  " + notes[i];
    }
    text += "\n  " + name + "  " + value;
  }
  return text;
}

} // namespace gpt
