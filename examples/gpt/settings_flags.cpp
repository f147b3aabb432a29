#include "settings_flags.h"

#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace gpt {
namespace {

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

/// A number above 0, and 1 at most.
CLI::Validator share() {
  const auto check = [](const std::string& text) {
    double value = 0;
    const bool is_share =
        CLI::detail::lexical_cast(text, value) && value > 0 && value <= 1;
    return is_share ? std::string()
                    : "takes a number above 0, 1 at most, not \"" + text + "\"";
  };
  return CLI::Validator(check, "");
}

CLI::Validator tokenizer() {
  const auto check = [](const std::string& text) {
    return text == "byte" || text == "bpe" || text == "none" ||
            text.ends_with(".json")
        ? std::string()
        : "takes byte, bpe, none or the path of a tokenizer.json, not \"" +
            text + "\"";
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
  app.add_flag(
      "--json",
      s.json_outcome,
      "Print how the run ended as one JSON object on stdout, the rest on stderr");
}

void add_data(CLI::App& app, Settings& s) {
  app.add_option("--text", s.data.text, "A folder of text, or one file")
      ->default_str("LibTorch's headers");
  app.add_option("--text-bytes", s.data.text_bytes, "How much of it to read")
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--tokenizer",
         s.data.tokenizer,
         "byte, bpe: learned pairs, or the path of a tokenizer.json; none: "
         "--tokens are numbers alone")
      ->check(tokenizer());
  app.add_option(
         "--vocabulary", s.data.vocabulary, "Size of the vocabulary of bpe")
      ->check(CLI::Range(257, 1 << 24));
  app.add_option("--validation", s.data.validation, "Share to validate with")
      ->check(CLI::Range(0.001, 0.5));
  app.add_option(
      "--tokens", s.data.tokens, "A token file to learn from, instead of text");
  app.add_option(
      "--validation-tokens",
      s.data.validation_tokens,
      "A token file to validate with");
  app.add_option("--data", s.data_folder, "Folder of the tokens")
      ->default_str("RUN/data");
}

void add_model(CLI::App& app, Settings& s) {
  app.add_option(
         "--model",
         s.exported.file,
         "A model that was written in Python, exported to a .pt2 file")
      ->default_str("the built-in GPT");
  app.add_option(
         "--model-output",
         s.exported.output,
         "The logits, or the loss, among what --model returns")
      ->default_str("found out");
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
  app.add_option(
         "--decay-steps",
         s.decay_steps,
         "Step at which the learning rate reaches --min-lr, and stays there")
      ->check(whole(0))
      ->default_str("STEPS");
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
      {{"fp32", Precision::Float32},
       {"bf16", Precision::BFloat16},
       {"fp16", Precision::Float16}},
      "What to compute in; parameters are kept in fp32. fp16 scales losses");
  app.add_flag(
      "--recompute",
      s.recompute,
      "Compute activations again in backward instead of keeping them");
  app.add_flag(
      "--chunked-loss",
      s.chunked_loss,
      "Hold the logits of a part of the tokens at a time, not of all");
  app.add_flag(
      "--capture",
      s.capture,
      "On a GPU: record a step as a CUDA graph and replay it");
  app.add_flag(
      "--keep-gathered",
      s.keep_gathered,
      "fsdp: keep parameters gathered until backward");
  app.add_flag("--offload", s.offload, "fsdp: shards stay in host memory");
}

void add_checkpoints(CLI::App& app, Settings& s) {
  app.add_option(
      "--weights",
      s.weights,
      "Begin with these: safetensors, a file or a folder");
  app.add_option("--checkpoint-every", s.checkpoint_every, "Steps; 0: never")
      ->check(whole(0));
  app.add_option("--keep", s.keep, "Newest checkpoints to keep; 0: all")
      ->check(whole(0));
  app.add_flag(
      "--keep-best",
      s.keep_best,
      "Save where the validation loss is the lowest so far, and keep that: "
      "RUN/best");
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
  add_choice<From>(
      app,
      "--from",
      s.from,
      {{"newest", From::Newest}, {"best", From::Best}},
      "eval, sample: which checkpoint to take");
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
         "--top-k", s.top_k, "Sample from this many likeliest tokens; 0: all")
      ->check(whole(0));
  app.add_option(
         "--top-p",
         s.top_p,
         "Sample from the likeliest tokens that have this share together")
      ->check(share());
  app.add_option(
         "--peak-tflops",
         s.peak_tflops,
         "TFLOPS of a GPU (of a rank on CPUs) in this precision, for MFU")
      ->check(number(false))
      ->default_str("that of known GPUs");
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
  app.add_option(
         "--overflow-at",
         s.overflow_at,
         "Gradients of the last rank are infinite in this step, to show what "
         "happens")
      ->check(whole(0));
}

} // namespace

void add_flags(CLI::App& app, Settings& settings) {
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
}

} // namespace gpt
