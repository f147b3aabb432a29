#include "settings.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

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

std::string nearest(
    const std::string& name,
    const std::vector<std::string>& names) {
  return *std::min_element(
      names.begin(), names.end(), [&](const auto& a, const auto& b) {
        return distance(name, a) < distance(name, b);
      });
}

/// The text with U+FFFD for bytes that are not UTF-8: paths and prompts may be
/// anything.
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

/// A file of settings: TOML, or JSON if it begins with a brace. Names are those
/// of the flags, with underscores if you like; they may be in sections named
/// like the groups of --help.
class SettingsFile : public CLI::ConfigTOML {
 public:
  explicit SettingsFile(const CLI::App& app) : app_(app) {
    comment(kNoComment);
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
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

 private:
  static constexpr char kNoComment = '\x01';

  /// CLI11 would end a value at a '#' inside its quotes too.
  std::vector<CLI::ConfigItem> from_toml(std::istream& input) const {
    std::stringstream uncommented;
    for (std::string line; std::getline(input, line);) {
      uncommented << without_comment(line) << "\n";
    }
    return CLI::ConfigTOML::from_config(uncommented);
  }

  static std::string without_comment(const std::string& line) {
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
  static json::parser_callback_t refuse_twice() {
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

  static std::vector<CLI::ConfigItem> from_json(std::istream& input) {
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

  void check_section(const std::vector<std::string>& names) const {
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

  void check(const CLI::ConfigItem& item) const {
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

  const CLI::App& app_;
};

/// A whole number that is not below `least`.
CLI::Validator whole(int64_t least) {
  const auto check = [least](const std::string& text) {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    return result.ec == std::errc() && result.ptr == end && value >= least
        ? std::string()
        : "takes a whole number, " + std::to_string(least) +
            " or more, not \"" + text + "\"";
  };
  return CLI::Validator(check, "");
}

/// A number that is positive, or not negative.
CLI::Validator number(bool may_be_zero) {
  const auto check = [may_be_zero](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) &&
        std::isfinite(value) && (value > 0 || (may_be_zero && value == 0));
    return is_number ? std::string()
                     : std::string("takes a number ") +
            (may_be_zero ? "of 0 or more" : "above 0") + ", not \"" + text +
            "\"";
  };
  return CLI::Validator(check, "");
}

CLI::Validator tokenizer() {
  const auto check = [](const std::string& text) {
    return text == "byte" || text == "bpe" || text.ends_with(".json")
        ? std::string()
        : "takes byte, bpe or the path of a tokenizer.json, not \"" + text +
            "\"";
  };
  return CLI::Validator(check, "");
}

template <class Enum>
using Choices = std::vector<std::pair<std::string, Enum>>;

/// An option that is one of some words; the first is the default.
template <class Enum>
void add_choice(
    CLI::App& app,
    const char* name,
    Enum& target,
    const Choices<Enum>& choices,
    const char* what) {
  std::vector<std::string> words;
  for (const auto& [word, value] : choices) {
    words.push_back(word);
  }
  const auto set = [&target, choices](const std::string& given) {
    for (const auto& [word, value] : choices) {
      if (word == given) {
        target = value;
      }
    }
  };
  app.add_option_function<std::string>(name, set, what)
      ->check(CLI::IsMember(words))
      ->default_str(words.front());
}

void add_run(CLI::App& app, Settings& s) {
  add_choice<Mode>(
      app,
      "--mode",
      s.mode,
      {{"train", Mode::Train},
       {"eval", Mode::Evaluate},
       {"sample", Mode::Sample},
       {"prepare", Mode::Prepare}},
      "What to do");
  app.add_option("--run", s.run, "Folder of the run: log, checkpoints, report");
  app.add_option(
         "--seed", s.seed, "Seed of the weights and of the order of the data")
      ->check(whole(0));
  app.add_option(
         "--device", s.device, "cpu, cuda, or auto: cuda if there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

void add_data(CLI::App& app, Settings& s) {
  app.add_option("--text", s.data.text, "A folder of text, or one file")
      ->default_str("LibTorch's headers");
  app.add_option("--text-bytes", s.data.text_bytes, "How much of it to read")
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--tokenizer",
         s.data.tokenizer,
         "byte, bpe: learned pairs, or the path of a tokenizer.json")
      ->check(tokenizer());
  app.add_option(
         "--vocabulary", s.data.vocabulary, "Size of the vocabulary of bpe")
      ->check(CLI::Range(257, 1 << 24));
  app.add_option("--validation", s.data.validation, "Share to validate with")
      ->check(CLI::Range(0.001, 0.5));
  app.add_option("--data", s.data_folder, "Folder of the tokens")
      ->default_str("RUN/data");
}

void add_model(CLI::App& app, Settings& s) {
  app.add_option("--layers", s.model.layers, "Blocks")->check(whole(1));
  app.add_option("--heads", s.model.heads, "Heads of attention")
      ->check(whole(1));
  app.add_option("--width", s.model.width, "Width of the layers")
      ->check(whole(1));
  app.add_option("--length", s.model.length, "Tokens that the model looks at")
      ->check(whole(1));
  app.add_option(
         "--dropout", s.model.dropout, "Share of activations that is dropped")
      ->check(CLI::Range(0.0, 0.9));
}

void add_training(CLI::App& app, Settings& s) {
  app.add_option("--steps", s.steps, "Steps in all, resumed ones included")
      ->check(whole(0));
  app.add_option("--batch", s.batch, "Windows per step, over all ranks")
      ->check(whole(1));
  app.add_option(
         "--micro-batch",
         s.micro_batch,
         "Windows per rank and forward; gradients accumulate over several")
      ->check(whole(0))
      ->default_str("BATCH / ranks");
  app.add_option("--lr", s.lr, "Highest learning rate")->check(number(false));
  app.add_option("--min-lr", s.min_lr, "Learning rate at the end of the cosine")
      ->check(number(true));
  app.add_option("--warmup", s.warmup, "Steps in which the learning rate rises")
      ->check(whole(0));
  app.add_option("--weight-decay", s.weight_decay, "Of matrices")
      ->check(number(true));
  app.add_option("--clip", s.clip, "Largest norm of gradients")
      ->check(number(false));
}

void add_parallel(CLI::App& app, Settings& s) {
  add_choice<Strategy>(
      app,
      "--strategy",
      s.strategy,
      {{"fsdp", Strategy::Fsdp},
       {"ddp", Strategy::Ddp},
       {"zero", Strategy::Zero}},
      "Everything sharded; copies; copies, but optimizer state sharded");
  add_choice<Precision>(
      app,
      "--precision",
      s.precision,
      {{"fp32", Precision::Float32}, {"bf16", Precision::BFloat16}},
      "What to compute in; parameters are kept in fp32");
  app.add_flag(
      "--recompute",
      s.recompute,
      "Compute activations again in backward instead of keeping them");
  app.add_flag(
      "--keep-gathered",
      s.keep_gathered,
      "fsdp: keep parameters gathered until backward");
  app.add_flag("--offload", s.offload, "fsdp: shards stay in host memory");
}

void add_checkpoints(CLI::App& app, Settings& s) {
  app.add_option("--checkpoint-every", s.checkpoint_every, "Steps; 0: never")
      ->check(whole(0));
  app.add_option("--keep", s.keep, "Newest checkpoints to keep; 0: all")
      ->check(whole(0));
  app.add_flag(
      "--wait-for-saves",
      s.wait_for_saves,
      "Save in the foreground: training waits");
  add_choice<Resume>(
      app,
      "--resume",
      s.resume,
      {{"auto", Resume::Auto},
       {"never", Resume::Never},
       {"must", Resume::Must}},
      "From the newest checkpoint of the run: if there is one; never; always");
}

void add_watching(CLI::App& app, Settings& s) {
  app.add_option("--eval-every", s.eval_every, "Steps; 0: never")
      ->check(whole(0));
  app.add_option(
         "--eval-windows",
         s.eval_windows,
         "Windows to evaluate on, if there are as many")
      ->check(whole(1));
  app.add_option("--sample-every", s.sample_every, "Steps; 0: at the end only")
      ->check(whole(0));
  app.add_option("--sample-tokens", s.sample_tokens, "Tokens to write")
      ->check(whole(0));
  app.add_option("--prompt", s.prompt, "Text to continue from");
  app.add_option(
         "--temperature", s.temperature, "Temperature of sampling; low is safe")
      ->check(number(false));
  app.add_option(
         "--timeline-step",
         s.timeline_step,
         "Steps whose timelines the report draws")
      ->check(whole(0));
  app.add_option("--trace", s.trace, "Steps to trace for Perfetto: 10-12");
  app.add_option(
         "--die-at",
         s.die_at,
         "The last rank kills itself after this step, to show what "
         "happens")
      ->check(whole(0));
  app.add_option(
         "--skip-at",
         s.skip_at,
         "The last rank skips this step, to show what happens")
      ->check(whole(0));
}

/// Settings that stay the same for the life of a run. They are kept in
/// RUN/settings.json: whoever resumes the run need not give them again, and
/// cannot change them.
struct Kept {
  std::string name;
  std::function<json(const Settings&)> get;
  std::function<void(Settings&, const json&)> set;
};

template <class Field>
Kept keep(const char* name, const Field& field) {
  return {
      .name = name,
      .get = [field](const Settings& s) { return json(field(s)); },
      .set = [field](Settings& s, const json& v) { v.get_to(field(s)); }};
}

std::vector<Kept> kept_settings() {
  return {
      keep(
          "seed", [](auto& s) -> auto& { return s.seed; }),
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

std::filesystem::path kept_file(const Settings& settings) {
  return settings.run / "settings.json";
}

/// Takes the settings that the run was started with, unless others are given.
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
  for (const auto& [name, get, set] : kept_settings()) {
    const auto found = kept.find(name);
    if (found == kept.end()) {
      continue;
    }
    if (app.get_option("--" + name)->count() == 0) {
      try {
        set(settings, *found);
      } catch (const json::exception&) {
        throw UsageError(
            "\"" + kept_file(settings).string() + "\" has " + text_of(*found) +
            " for \"" + name +
            "\", which is not valid. Correct it, or give --" + name + ".");
      }
    } else if (get(settings) != *found) {
      throw UsageError(
          "the run in \"" + settings.run.string() + "\" has --" + name + " " +
          text_of(*found) + ", not " + text_of(get(settings)) +
          ". Leave it out, or choose another --run.");
    }
  }
}

/// Options by group. Numbers are numbers, the rest is text.
std::string described(const CLI::App& app, const Settings& settings) {
  json groups;
  for (const auto* option : app.get_options()) {
    if (option->get_lnames().empty() || !option->get_configurable() ||
        option->get_group() == "Other") {
      continue;
    }
    const auto text = option->count() > 0 ? option->results().back()
        : option->get_expected_max() == 0 ? "false" // a flag
                                          : option->get_default_str();
    const auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto& name = option->get_lnames().front();
    groups[CLI::detail::to_lower(option->get_group())][name] =
        value.is_number() || value.is_boolean() ? value : json(text);
    for (const auto& kept : kept_settings()) {
      if (kept.name == name) {
        groups[CLI::detail::to_lower(option->get_group())][name] =
            kept.get(settings);
      }
    }
  }
  return text_of(groups);
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
  if (s.strategy != Strategy::Fsdp && (s.keep_gathered || s.offload)) {
    throw UsageError("--keep-gathered and --offload are for --strategy fsdp.");
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
  CLI::App app{"Trains a GPT on text. Run it under `tessera run -n RANKS`."};
  app.name("gpt");
  app.option_defaults()->always_capture_default();
  // The last value counts: scripts append flags to those they were given.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(32);
  Settings settings;
  settings.data.text = GPT_TEXT_FOLDER; // set by CMake
  const auto group = [&](const char* name, auto&& add) {
    app.option_defaults()->group(name);
    add(app, settings);
  };
  group("Run", add_run);
  group("Data", add_data);
  group("Model", add_model);
  group("Training", add_training);
  group("Parallel", add_parallel);
  group("Checkpoints", add_checkpoints);
  group("Watching", add_watching);
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
  for (auto* path : {&settings.data.text, &settings.data_folder}) {
    if (!path->empty()) { // the run may resume from another folder
      *path = fs::absolute(*path).lexically_normal().string();
    }
  }
  auto& tokenizer = settings.data.tokenizer;
  if (tokenizer.ends_with(".json")) {
    tokenizer = fs::absolute(tokenizer).lexically_normal().string();
  }
  take_kept(app, settings);
  if (tokenizer != "bpe" && app.get_option("--vocabulary")->count() > 0) {
    throw UsageError(
        "--vocabulary is for --tokenizer bpe; " +
        (tokenizer == "byte" ? "bytes are 256."
                             : "\"" + tokenizer + "\" has one of its own."));
  }
  settings.data.left_out = {settings.run, settings.tokens_folder()};
  check(settings, num_ranks);
  settings.json = described(app, settings);
  return settings;
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
