// `tessera ckpt convert`, `consolidate` and `reshard`: one checkpoint as
// another.
#include <CLI/CLI.hpp>

#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/target_options.h"
#include "checkpoint/tools/write_dcp.h"
#include "checkpoint/tools/write_safetensors.h"
#include "checkpoint/tools/write_torch_file.h"
#include "cli/ckpt_commands.h"
#include "cli/interrupts.h"
#include "cli/progress_bar.h"

namespace tessera::cli {
namespace {

struct WriteSettings {
  std::string from;
  std::string to;
  std::string format = "dcp";
  int world = 1;
  std::optional<std::string> max_shard_size;
  std::string dtype;
  checkpoint::ContentOptions content;
  checkpoint::TargetOptions target;
};

void add_paths(CLI::App& command, WriteSettings& settings) {
  command.add_option("FROM", settings.from, "Checkpoint of any format")
      ->required();
  command.add_option("TO", settings.to, "Where to write")->required();
  command.add_flag(
      "--overwrite",
      settings.target.overwrite,
      "Replace an existing file or folder");
}

void add_format(CLI::App& command, WriteSettings& settings) {
  command.add_option("--to", settings.format, "dcp, safetensors or torch")
      ->check(CLI::IsMember({"dcp", "safetensors", "torch"}));
  command.add_option(
      "--max-shard-size",
      settings.max_shard_size,
      "safetensors in a folder: size of a file (default 5GB)");
  command.add_flag(
      "--drop-values",
      settings.target.drop_values,
      "safetensors: leave out values that are not tensors");
}

std::optional<format::DType> parse_dtype(const std::string& name) {
  static const std::map<std::string, std::string> kShort{
      {"fp64", "float64"},
      {"fp32", "float32"},
      {"fp16", "float16"},
      {"bf16", "bfloat16"}};
  if (name.empty()) {
    return std::nullopt;
  }
  const auto found = kShort.find(name);
  return format::dtype_of_torch_name(
      found == kShort.end() ? name : found->second);
}

int write(WriteSettings& settings) {
  if (settings.format != "safetensors" &&
      (settings.target.drop_values || settings.max_shard_size)) {
    throw std::invalid_argument(
        "--drop-values and --max-shard-size belong to --to safetensors; " +
        settings.format + " supports neither.");
  }
  if (settings.max_shard_size) {
    settings.target.max_shard_bytes =
        checkpoint::parse_bytes(*settings.max_shard_size);
  }
  settings.content.dtype = parse_dtype(settings.dtype);
  const auto source = checkpoint::Source::open(settings.from);
  const auto content = choose(*source, settings.content);
  {
    const Interrupts interrupts;
    ProgressBar bar("writing", [] { Interrupts::check(); });
    if (settings.format == "dcp") {
      write_dcp(
          content,
          settings.to,
          settings.world,
          settings.target,
          bar.progress());
    } else if (settings.format == "safetensors") {
      write_safetensors(content, settings.to, settings.target, bar.progress());
    } else {
      write_torch_file(content, settings.to, settings.target, bar.progress());
    }
  }
  const bool drops =
      settings.format == "safetensors" && settings.target.drop_values;
  std::cout << settings.to << ": "
            << count_text(content.tensors.size(), "tensor") << " ("
            << bytes_text(content.bytes()) << ") and "
            << count_text(drops ? 0 : content.values.size(), "other value")
            << " written";
  if (drops && !content.values.empty()) {
    std::cout << ", " << count_text(content.values.size(), "value")
              << " left out";
  }
  std::cout << "\n";
  return 0;
}

} // namespace

Action add_convert(CLI::App& app) {
  auto settings = std::make_shared<WriteSettings>();
  auto* command = app.add_subcommand(
      "convert", "Write a checkpoint in another format, piece by piece");
  add_paths(*command, *settings);
  add_format(*command, *settings);
  command->get_option("--to")->required();
  command->add_option(
      "--select",
      settings->content.select,
      "Only this name and names below it; may be repeated");
  command->add_option(
      "--exclude",
      settings->content.exclude,
      "Leave out this name and names below it; may be repeated");
  command->add_option(
      "--strip-prefix",
      settings->content.strip_prefix,
      "Remove this prefix from names, with the dot after it");
  command->add_option(
      "--key-prefix",
      settings->content.add_prefix,
      "Add this prefix to names, with a dot");
  command
      ->add_option(
          "--dtype",
          settings->dtype,
          "For floating-point tensors: float32, bfloat16, ...; scalars keep their dtype")
      ->check(CLI::IsMember(
          {"float64",
           "float32",
           "float16",
           "bfloat16",
           "fp64",
           "fp32",
           "fp16",
           "bf16"}));
  command->footer(
      "safetensors is written as one file if TO ends with .safetensors, else\n"
      "as a folder, with an index if there are several files.\n"
      "Example: tessera ckpt convert step_1000 model.safetensors --to safetensors\n"
      "           --select model --strip-prefix model --dtype bfloat16");
  return [settings] { return write(*settings); };
}

Action add_consolidate(CLI::App& app) {
  auto settings = std::make_shared<WriteSettings>();
  auto* command = app.add_subcommand(
      "consolidate", "Merge what many ranks saved, in one process");
  add_paths(*command, *settings);
  add_format(*command, *settings);
  return [settings] { return write(*settings); };
}

Action add_reshard(CLI::App& app) {
  auto settings = std::make_shared<WriteSettings>();
  auto* command = app.add_subcommand(
      "reshard", "Write a DCP folder as N ranks would save it, in one process");
  add_paths(*command, *settings);
  command->add_option("--world", settings->world, "Ranks")
      ->required()
      ->check(CLI::Range(1, 65536));
  return [settings] { return write(*settings); };
}

} // namespace tessera::cli
