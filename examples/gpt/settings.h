#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "model_config.h"

namespace gpt {

struct DataSettings {
  /// Token files to use as they are, instead of text. Without the second one
  /// there is nothing to validate with.
  std::string tokens;
  std::string validation_tokens;
  std::string text; // a folder or a file
  int64_t text_bytes = 1 << 22; // read at most this much
  /// Or "bpe", or the path of a tokenizer.json; of token files also "none".
  std::string tokenizer = "byte";
  int64_t vocabulary = 1024; // of "bpe"
  double validation = 0.05; // share of the text
  /// Folders that do not count as text even if they are below it: the run's
  /// own.
  std::vector<std::filesystem::path> left_out;
};

/// A model that was written in Python, in place of the built-in one.
struct ExportedSettings {
  std::string file; // empty: the built-in one
  std::string output; // the result to learn from; empty: found out
  std::string digest; // of the file that the run began with; empty: not known
};

enum class Mode { Train, Evaluate, Sample, Prepare };
enum class Strategy { Fsdp, Ddp, Zero };
enum class Precision { Float32, BFloat16, Float16 };
enum class Resume { Auto, Never, Must };
enum class From { Newest, Best };

/// A setting by its flag, for people to read.
struct ShownSetting {
  std::string group; // as in --help
  std::string name; // of the flag, without dashes
  std::string value;
  std::string default_value;
  bool is_default = true;
};

/// Everything that flags and the configuration file can change; settings.cpp
/// says what each is.
struct Settings {
  Mode mode = Mode::Train;
  std::filesystem::path run = "runs/gpt";
  uint64_t seed = 0;
  bool json_outcome = false;

  DataSettings data;
  std::string data_folder; // empty: "data" of the run
  GptConfig model; // its vocabulary comes from the data
  ExportedSettings exported;
  std::string weights; // to begin with; empty: the model's own

  int64_t steps = 1000;
  int64_t batch = 16;
  int64_t micro_batch = 0;
  double lr = 1e-3;
  double min_lr = 1e-4;
  int64_t warmup = 20;
  int64_t decay_steps = 0; // 0: `steps`
  double weight_decay = 0.1;
  double clip = 1.0;

  Strategy strategy = Strategy::Fsdp;
  Precision precision = Precision::Float32;
  bool recompute = false;
  bool chunked_loss = false;
  bool capture = false;
  bool keep_gathered = false;
  bool offload = false;
  std::string device = "auto";

  int64_t checkpoint_every = 100;
  int64_t keep = 3;
  bool keep_best = false;
  bool wait_for_saves = false;
  Resume resume = Resume::Auto;
  From from = From::Newest;

  int64_t eval_every = 100;
  int64_t eval_windows = 64;
  int64_t sample_every = 0;
  int64_t sample_tokens = 200;
  std::string prompt = "#include <";
  double temperature = 0.7;
  int64_t top_k = 0; // 0: all tokens
  double top_p = 1.0;
  double peak_tflops = 0; // 0: from the name of the GPU

  int64_t timeline_step = 10;
  std::string trace; // "10-12"
  int64_t trace_first = 0;
  int64_t trace_last = 0;
  int64_t die_at = 0;
  int64_t skip_at = 0;
  int64_t overflow_at = 0;

  /// The same settings as a table, in the order of --help.
  std::vector<ShownSetting> table;
  /// The same by group and name, as JSON, for the run's log.
  std::string json;

  /// Sets the length of the windows, which `table` and `json` show.
  void choose_length(int64_t length);
  /// Where the tokens are.
  std::filesystem::path tokens_folder() const;
  /// Whether the run has checkpoints: it is then bound to its data and its
  /// model.
  bool has_checkpoints() const;
  /// Rows that a rank takes at once, and how often per step.
  int64_t rows(int num_ranks) const;
  int64_t accumulation(int num_ranks) const;
  /// The step at which the learning rate is at its lowest.
  int64_t last_decay_step() const {
    return decay_steps > 0 ? decay_steps : steps;
  }
};

class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// From the command line, the file it names, and RUN/settings.json. Returns
/// nothing if --help was given, which only `print_help` prints. Throws
/// UsageError for unknown names, with the nearest known one, and for settings
/// that make no sense on so many ranks.
std::optional<Settings> parse_settings(
    int argc,
    char** argv,
    int num_ranks,
    bool print_help);

/// The settings that differ from their defaults, with these, and the important
/// ones: lines with aligned columns.
std::string printed_table(const std::vector<ShownSetting>& table);

/// Writes RUN/settings.json for a run without checkpoints: eval, sample and
/// resumed training use them. Throws std::runtime_error.
void keep_settings(const Settings& settings);

} // namespace gpt
