#include "settings.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "kept_settings.h"
#include "settings_file.h"
#include "settings_flags.h"
#include "settings_table.h"

namespace gpt {
namespace {

/// Refuses flags that are about something else than what was chosen.
void refuse_flags(
    const CLI::App& app,
    const std::vector<std::string>& names,
    const std::string& why) {
  for (const auto& name : names) {
    if (app.get_option(name)->count() > 0) {
      throw UsageError(name + " " + why);
    }
  }
}

void check_model_flags(const CLI::App& app, const Settings& s) {
  if (s.exported.file.empty()) {
    refuse_flags(app, {"--model-output"}, "is for --model.");
    return;
  }
  refuse_flags(
      app,
      {"--layers", "--heads", "--width", "--dropout", "--chunked-loss"},
      "is for the built-in GPT; --model \"" + s.exported.file +
          "\" has what it was exported with.");
}

void check_data_flags(const CLI::App& app, const Settings& s) {
  const auto& tokenizer = s.data.tokenizer;
  if (s.data.tokens.empty()) {
    refuse_flags(app, {"--validation-tokens"}, "is for --tokens.");
    if (tokenizer == "none") {
      throw UsageError("--tokenizer none is for --tokens.");
    }
  } else {
    refuse_flags(
        app,
        {"--text", "--text-bytes", "--validation", "--vocabulary"},
        "is about text, which --tokens stands for.");
    if (tokenizer == "bpe") {
      throw UsageError(
          "--tokenizer bpe learns from text; --tokens needs the tokenizer "
          "that made them: a tokenizer.json, byte, or none.");
    }
    const bool evaluates =
        s.mode == Mode::Evaluate || (s.mode == Mode::Train && s.eval_every > 0);
    if (s.data.validation_tokens.empty() && evaluates) {
      throw UsageError(
          "--tokens alone leave nothing to validate with. Give "
          "--validation-tokens, or train with --eval-every 0.");
    }
  }
  if (tokenizer != "bpe" && app.get_option("--vocabulary")->count() > 0) {
    throw UsageError(
        "--vocabulary is for --tokenizer bpe; " +
        (tokenizer == "byte" ? "bytes are 256."
                             : "\"" + tokenizer + "\" has one of its own."));
  }
}

void check(Settings& s, int num_ranks) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (s.model.width % s.model.heads != 0) {
    throw UsageError(
        "--width " + text(s.model.width) + " cannot be divided among --heads " +
        text(s.model.heads) + ".");
  }
  const int64_t at_once = s.rows(num_ranks) * num_ranks;
  if (s.mode == Mode::Train && s.batch % at_once != 0) {
    throw UsageError(
        "--batch " + text(s.batch) + " cannot be divided among " +
        text(num_ranks) + " ranks" +
        (s.micro_batch > 0 ? " with --micro-batch " + text(s.micro_batch)
                           : "") +
        ". Try --batch " +
        text(std::max<int64_t>(1, s.batch / at_once) * at_once) + ".");
  }
  if (s.data.text_bytes < 1) {
    throw UsageError("--text-bytes takes a number above 0.");
  }
  if (!s.trace.empty()) {
    char rest = 0;
    const int found = std::sscanf(
        s.trace.c_str(), "%ld-%ld%c", &s.trace_first, &s.trace_last, &rest);
    if (found != 2 || s.trace_first < 1 || s.trace_first > s.trace_last) {
      throw UsageError(
          "--trace takes two steps, as in 10-12, not \"" + s.trace + "\".");
    }
  }
  if (s.min_lr > s.lr) {
    throw UsageError("--min-lr is above --lr.");
  }
  if (s.keep_best && (s.eval_every == 0 || s.checkpoint_every == 0)) {
    throw UsageError(
        "--keep-best needs evaluations and checkpoints: --eval-every and "
        "--checkpoint-every above 0.");
  }
  if (s.from == From::Best && s.mode == Mode::Train) {
    throw UsageError(
        "--from best is for --mode eval and sample; training resumes from the "
        "newest checkpoint.");
  }
  if (s.strategy != Strategy::Fsdp && (s.keep_gathered || s.offload)) {
    throw UsageError("--keep-gathered and --offload are for --strategy fsdp.");
  }
  if (s.capture && s.overflow_at > 0) {
    throw UsageError(
        "--overflow-at changes one step, and --capture repeats one. Leave out "
        "one of them.");
  }
}

} // namespace

int64_t Settings::rows(int num_ranks) const {
  return micro_batch > 0 ? micro_batch
                         : std::max<int64_t>(1, batch / num_ranks);
}

std::filesystem::path Settings::tokens_folder() const {
  return data_folder.empty() ? run / "data"
                             : std::filesystem::path(data_folder);
}

bool Settings::has_checkpoints() const {
  const auto folder = run / "checkpoints";
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    if (entry->path().filename().string().starts_with("step_")) {
      return true;
    }
  }
  return false;
}

int64_t Settings::accumulation(int num_ranks) const {
  return batch / (rows(num_ranks) * num_ranks);
}

std::optional<Settings> parse_settings(
    int argc,
    char** argv,
    int num_ranks,
    bool print_help) {
  CLI::App app{
      "Trains a GPT, or a language model of Python's, on text. Run it under `tessera run -n RANKS`."};
  app.name("gpt");
  app.option_defaults()->always_capture_default();
  // The last value counts: scripts append flags to those they were given.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(32);
  Settings settings;
  settings.data.text = GPT_TEXT_FOLDER; // set by CMake
  const Settings defaults = settings;
  add_flags(app, settings);
  app.set_config(
         "--config", "", "File with these settings, TOML or JSON; flags win")
      ->group("Other");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  app.config_formatter(std::make_shared<SettingsFile>(app));
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    if (print_help) {
      std::cout << app.help();
    }
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  for (std::string word : app.remaining()) {
    word = word.substr(0, word.find('='));
    throw UsageError(
        "there is no \"" + word + "\"" +
        (word.starts_with("--") ? ". Is --" +
                 nearest(word.substr(2), option_names(app)) + " meant?"
                                : "; all settings are flags, --name value."));
  }
  namespace fs = std::filesystem;
  for (auto* path :
       {&settings.data.text,
        &settings.data.tokens,
        &settings.data.validation_tokens,
        &settings.data_folder,
        &settings.exported.file,
        &settings.weights}) {
    if (!path->empty()) { // the run may resume from another folder
      *path = fs::absolute(*path).lexically_normal().string();
    }
  }
  auto& tokenizer = settings.data.tokenizer;
  if (tokenizer.ends_with(".json")) {
    tokenizer = fs::absolute(tokenizer).lexically_normal().string();
  }
  if (!settings.data.tokens.empty() &&
      app.get_option("--tokenizer")->count() == 0) {
    tokenizer = "none";
  }
  if (!settings.exported.file.empty() &&
      app.get_option("--length")->count() == 0) {
    settings.model.length = 0; // the model says it
  }
  take_kept(app, settings);
  if (tokenizer == "none" && app.get_option("--prompt")->count() == 0) {
    settings.prompt = ""; // numbers, if anything
  }
  check_model_flags(app, settings);
  check_data_flags(app, settings);
  settings.data.left_out = {settings.run, settings.tokens_folder()};
  check(settings, num_ranks);
  settings.table = table_of(app, settings, defaults);
  settings.json = json_of(settings.table);
  return settings;
}

} // namespace gpt
