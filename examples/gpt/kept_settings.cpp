#include "kept_settings.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "settings_file.h"

namespace gpt {
namespace {

using nlohmann::json;

template <class Field>
Kept keep(const char* name, const Field& field) {
  return {
      .name = name,
      .get = [field](const Settings& s) { return json(field(s)); },
      .set = [field](Settings& s, const json& v) { v.get_to(field(s)); }};
}

std::filesystem::path kept_file(const Settings& settings) {
  return settings.run / "settings.json";
}

/// A run stays with the built-in model, or with an exported one.
void check_model_kind(const Settings& settings, bool is_exported) {
  if (!settings.exported.file.empty() && !is_exported) {
    throw UsageError(
        "the run in \"" + settings.run.string() +
        "\" trains the built-in GPT, not --model \"" + settings.exported.file +
        "\". Leave it out, or choose another --run.");
  }
}

} // namespace

std::vector<Kept> kept_settings() {
  return {
      keep(
          "seed", [](auto& s) -> auto& { return s.seed; }),
      keep(
          "model", [](auto& s) -> auto& { return s.exported.file; }),
      keep(
          "model-digest", [](auto& s) -> auto& { return s.exported.digest; }),
      keep(
          "model-output", [](auto& s) -> auto& { return s.exported.output; }),
      keep(
          "tokens", [](auto& s) -> auto& { return s.data.tokens; }),
      keep(
          "validation-tokens",
          [](auto& s) -> auto& { return s.data.validation_tokens; }),
      keep(
          "text", [](auto& s) -> auto& { return s.data.text; }),
      keep(
          "data", [](auto& s) -> auto& { return s.data_folder; }),
      keep(
          "text-bytes", [](auto& s) -> auto& { return s.data.text_bytes; }),
      keep(
          "tokenizer", [](auto& s) -> auto& { return s.data.tokenizer; }),
      keep(
          "vocabulary", [](auto& s) -> auto& { return s.data.vocabulary; }),
      keep(
          "validation", [](auto& s) -> auto& { return s.data.validation; }),
      keep(
          "layers", [](auto& s) -> auto& { return s.model.layers; }),
      keep(
          "heads", [](auto& s) -> auto& { return s.model.heads; }),
      keep(
          "width", [](auto& s) -> auto& { return s.model.width; }),
      keep(
          "length", [](auto& s) -> auto& { return s.model.length; }),
      keep(
          "dropout", [](auto& s) -> auto& { return s.model.dropout; })};
}

void take_kept(const CLI::App& app, Settings& settings) {
  std::ifstream file(kept_file(settings));
  if (!file || !settings.has_checkpoints()) {
    return;
  }
  const auto kept = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!kept.is_object()) {
    throw UsageError(
        "\"" + kept_file(settings).string() +
        "\" is not a file of settings. Remove it, and give the run's settings.");
  }
  check_model_kind(settings, kept.value("model", json("")) != "");
  for (const auto& [name, get, set] : kept_settings()) {
    const auto found = kept.find(name);
    if (found == kept.end()) {
      continue;
    }
    const auto* option = app.get_option_no_throw("--" + name);
    if (option == nullptr || option->count() == 0) {
      try {
        set(settings, *found);
      } catch (const json::exception&) {
        throw UsageError(
            "\"" + kept_file(settings).string() + "\" has " + text_of(*found) +
            " for \"" + name +
            "\", which is not valid. Correct it, or give --" + name + ".");
      }
    } else if (get(settings) != *found && name != "model") { // see its digest
      throw UsageError(
          "the run in \"" + settings.run.string() + "\" has --" + name + " " +
          text_of(*found) + ", not " + text_of(get(settings)) +
          ". Leave it out, or choose another --run.");
    }
  }
}

void keep_settings(const Settings& settings) {
  const auto path = kept_file(settings);
  if (std::filesystem::exists(path) && settings.has_checkpoints()) {
    return; // parse_settings() made sure that they are the same
  }
  json kept;
  for (const auto& [name, get, set] : kept_settings()) {
    kept[name] = get(settings);
  }
  std::filesystem::create_directories(settings.run);
  const std::filesystem::path beside = path.string() + ".partial";
  std::ofstream file(beside);
  file << kept.dump(2, ' ', false, json::error_handler_t::replace) << "\n";
  file.close();
  if (!file) {
    throw std::runtime_error("cannot write \"" + beside.string() + "\".");
  }
  std::filesystem::rename(beside, path);
}

} // namespace gpt
