#include "settings.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iostream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string_view>
#include <vector>

namespace gpt {
namespace {

using nlohmann::json;

/// How many letters have to be changed, added or left out.
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
/// of the flags, with underscores if you like; they may stand in sections named
/// as the groups of --help.
class SettingsFile : public CLI::ConfigTOML {
 public:
  explicit SettingsFile(const CLI::App& app) : app_(app) {
    comment(kNoComment);
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> entries;
    const bool is_json = (input >> std::ws).peek() == '{';
    for (auto& item : is_json ? from_json(input) : from_toml(input)) {
      if (item.name == "++" || item.name == "--") {
        continue; // begin and end of a section
      }
      std::replace(item.name.begin(), item.name.end(), '_', '-');
      check(item);
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
      if (quote != 0) {
        quote = line[i] == quote ? 0 : quote;
      } else if (line[i] == '"' || line[i] == '\'') {
        quote = line[i];
      } else if (line[i] == '#') {
        return line.substr(0, i);
      }
    }
    return line;
  }

  static std::string text_of(const json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
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
      file = json::parse(input);
    } catch (const json::parse_error& error) {
      throw UsageError(
          std::string("the file of settings is no JSON: ") + error.what());
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

  void check(const CLI::ConfigItem& item) const {
    const auto names = option_names(app_);
    if (std::find(names.begin(), names.end(), item.name) == names.end()) {
      throw UsageError(
          "the file of settings has \"" + item.fullname() +
          "\", which there is not. Is \"" + nearest(item.name, names) +
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
      {{"train", Mode::kTrain},
       {"eval", Mode::kEvaluate},
       {"sample", Mode::kSample},
       {"prepare", Mode::kPrepare}},
      "What to do");
  app.add_option("--run", s.run, "Folder of the run: log, checkpoints, report");
  app.add_option("--seed", s.seed, "Of the weights and the order of the data");
  app.add_option(
         "--device", s.device, "cpu, cuda, or auto: cuda if there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

void add_data(CLI::App& app, Settings& s) {
  app.add_option("--text", s.data.text, "A folder of text, or one file")
      ->default_str("LibTorch's headers");
  app.add_option("--text-bytes", s.data.text_bytes, "How much of it to read")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--tokenizer", s.data.tokenizer, "byte, or bpe: learned pairs")
      ->check(CLI::IsMember({"byte", "bpe"}));
  app.add_option("--vocabulary", s.data.vocabulary, "Tokens of bpe")
      ->check(CLI::Range(257, 1 << 24));
  app.add_option("--validation", s.data.validation, "Share to validate with")
      ->check(CLI::Range(0.001, 0.5));
  app.add_option("--data", s.data_folder, "Where tokens are kept")
      ->default_str("RUN/data");
}

void add_model(CLI::App& app, Settings& s) {
  app.add_option("--layers", s.model.layers, "Blocks")
      ->check(CLI::PositiveNumber);
  app.add_option("--heads", s.model.heads, "Heads of attention")
      ->check(CLI::PositiveNumber);
  app.add_option("--width", s.model.width, "Width of the layers")
      ->check(CLI::PositiveNumber);
  app.add_option("--length", s.model.length, "Tokens that it looks at")
      ->check(CLI::PositiveNumber);
  app.add_option("--dropout", s.model.dropout, "Share that is dropped")
      ->check(CLI::Range(0.0, 0.9));
}

void add_training(CLI::App& app, Settings& s) {
  app.add_option("--steps", s.steps, "Steps in all, resumed ones included")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--batch", s.batch, "Windows a step, over all ranks")
      ->check(CLI::PositiveNumber);
  app.add_option(
         "--micro-batch",
         s.micro_batch,
         "Windows that a rank takes at once; the gradients of several add up")
      ->check(CLI::NonNegativeNumber)
      ->default_str("BATCH / ranks");
  app.add_option("--lr", s.lr, "Highest learning rate")
      ->check(CLI::PositiveNumber);
  app.add_option("--min-lr", s.min_lr, "Where the cosine ends")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--warmup", s.warmup, "Steps in which it rises")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--weight-decay", s.weight_decay, "Of matrices")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", s.clip, "Largest norm of gradients")
      ->check(CLI::PositiveNumber);
}

void add_parallel(CLI::App& app, Settings& s) {
  add_choice<Strategy>(
      app,
      "--strategy",
      s.strategy,
      {{"fsdp", Strategy::kFsdp},
       {"ddp", Strategy::kDdp},
       {"zero", Strategy::kZero}},
      "Everything sharded; copies; copies, but optimizer state sharded");
  add_choice<Precision>(
      app,
      "--precision",
      s.precision,
      {{"fp32", Precision::kFloat32}, {"bf16", Precision::kBFloat16}},
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
      ->check(CLI::NonNegativeNumber);
  app.add_option("--keep", s.keep, "Newest checkpoints to keep; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_flag(
      "--wait-for-saves", s.wait_for_saves, "Stand still while saving");
  add_choice<Resume>(
      app,
      "--resume",
      s.resume,
      {{"auto", Resume::kAuto},
       {"never", Resume::kNever},
       {"must", Resume::kMust}},
      "From the newest checkpoint of the run: if there is one; never; always");
}

void add_watching(CLI::App& app, Settings& s) {
  app.add_option("--eval-every", s.eval_every, "Steps; 0: never")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--eval-windows", s.eval_windows, "Windows to evaluate on")
      ->check(CLI::PositiveNumber);
  app.add_option("--sample-every", s.sample_every, "Steps; 0: at the end only")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--sample-tokens", s.sample_tokens, "Tokens to write")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--prompt", s.prompt, "What to go on from");
  app.add_option("--temperature", s.temperature, "Of sampling; low is safe")
      ->check(CLI::PositiveNumber);
  app.add_option("--timeline-step", s.timeline_step, "Drawn in the report")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--trace", s.trace, "Steps to trace for Perfetto: 10-12");
  app.add_option(
         "--die-at",
         s.die_at,
         "The last rank kills itself after this step, to show what then "
         "happens")
      ->check(CLI::NonNegativeNumber);
}

/// Options by group. Numbers are numbers, the rest is text.
std::string described(const CLI::App& app) {
  json groups;
  for (const auto* option : app.get_options()) {
    if (option->get_lnames().empty() || !option->get_configurable() ||
        option->get_group() == "Other") {
      continue;
    }
    const auto text = option->count() > 0
        ? CLI::detail::join(option->results(), " ")
        : option->get_expected_max() == 0 ? "false" // a flag
                                          : option->get_default_str();
    const auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto& name = option->get_lnames().front();
    groups[CLI::detail::to_lower(option->get_group())][name] =
        value.is_number() || value.is_boolean() ? value : json(text);
  }
  return groups.dump();
}

void check(Settings& s, int num_ranks) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (s.model.width % s.model.heads != 0) {
    throw UsageError(
        "--width " + text(s.model.width) + " cannot be divided among --heads " +
        text(s.model.heads) + ".");
  }
  const int64_t at_once = s.rows(num_ranks) * num_ranks;
  if (at_once == 0 || s.batch % at_once != 0) {
    throw UsageError(
        "--batch " + text(s.batch) + " cannot be divided among " +
        text(num_ranks) + " ranks" +
        (s.micro_batch > 0 ? " with --micro-batch " + text(s.micro_batch)
                           : "") +
        ". Try --batch " +
        text(
            std::max<int64_t>(1, s.batch / std::max<int64_t>(at_once, 1)) *
            std::max<int64_t>(at_once, num_ranks)) +
        ".");
  }
  if (s.min_lr > s.lr) {
    throw UsageError("--min-lr is above --lr.");
  }
  if (s.strategy != Strategy::kFsdp && (s.keep_gathered || s.offload)) {
    throw UsageError("--keep-gathered and --offload are for --strategy fsdp.");
  }
}

} // namespace

int64_t Settings::rows(int num_ranks) const {
  return micro_batch > 0 ? micro_batch : batch / num_ranks;
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
  // The last one counts: scripts add flags behind those they were given.
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
  if (settings.data.tokenizer == "byte" &&
      app.get_option("--vocabulary")->count() > 0) {
    throw UsageError("--vocabulary is for --tokenizer bpe; bytes are 256.");
  }
  if (settings.data_folder.empty()) {
    settings.data_folder = settings.run / "data";
  }
  check(settings, num_ranks);
  settings.json = described(app);
  return settings;
}

} // namespace gpt
