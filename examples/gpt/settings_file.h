// Files of settings, for --config.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <istream>
#include <string>
#include <vector>

namespace gpt {

/// The one of `names` that is most like `name`.
std::string nearest(
    const std::string& name,
    const std::vector<std::string>& names);

/// The text with U+FFFD for bytes that are not UTF-8: paths and prompts may be
/// anything.
std::string text_of(const nlohmann::json& value);

/// Without dashes.
std::vector<std::string> option_names(const CLI::App& app);

/// A file of settings: TOML, or JSON if it begins with a brace. Names are those
/// of the flags, with underscores if you like; they may be in sections named
/// like the groups of --help. Throws UsageError.
class SettingsFile : public CLI::ConfigTOML {
 public:
  explicit SettingsFile(const CLI::App& app) : app_(app) {
    comment(kNoComment);
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

 private:
  static constexpr char kNoComment = '\x01';

  std::vector<CLI::ConfigItem> from_toml(std::istream& input) const;
  void check_section(const std::vector<std::string>& names) const;
  void check(const CLI::ConfigItem& item) const;

  const CLI::App& app_;
};

} // namespace gpt
