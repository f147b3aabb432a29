// `tessera ckpt`: inspects, verifies, converts and compares checkpoints.
#include <CLI/CLI.hpp>

#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/tools/content.h"
#include "checkpoint/tools/diff.h"
#include "checkpoint/tools/inspect.h"
#include "checkpoint/tools/target_options.h"
#include "checkpoint/tools/text.h"
#include "checkpoint/tools/verify.h"
#include "checkpoint/tools/write_dcp.h"
#include "checkpoint/tools/write_safetensors.h"
#include "checkpoint/tools/write_torch_file.h"
#include "cli/commands.h"
#include "cli/interrupts.h"
#include "cli/progress_bar.h"

namespace tessera::cli {
namespace {

using checkpoint::Source;

constexpr int kCannotDoIt = 2;
constexpr int kUnsupported = 3;

// ---- inspect and verify ----------------------------------------------------

Action add_inspect(CLI::App& app) {
  struct Settings {
    std::string path;
    bool json = false;
    bool boxes = false;
  };
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "inspect", "Names, shapes, dtypes, sizes and files of a checkpoint");
  command->add_option("PATH", settings->path, "Folder or file")->required();
  command->add_flag("--boxes", settings->boxes, "Show every stored box");
  command->add_flag("--json", settings->json, "As JSON, with every box");
  return [settings] {
    const auto source = Source::open(settings->path);
    std::cout
        << (settings->json ? inspect_json(*source)
                           : inspect_text(
                                 *source,
                                 settings->boxes ? checkpoint::ShowBoxes::Yes
                                                 : checkpoint::ShowBoxes::No));
    return 0;
  };
}

int print_report(const checkpoint::VerifyReport& report) {
  for (const auto& damage : report.damages) {
    std::cout << "DAMAGED  " << damage << "\n";
  }
  for (const auto& part : report.unsupported) {
    std::cout << "UNSUPPORTED  " << part << "\n";
  }
  if (!report.damages.empty()) {
    std::cout << count_text(report.damages.size(), "damage")
              << " found. Use another checkpoint.\n";
    return 1;
  }
  if (!report.unsupported.empty()) {
    std::cout
        << "No damage was found, but parts of the checkpoint are not supported.\n";
    return kUnsupported;
  }
  std::cout << "sound: " << report.format << ", "
            << count_text(report.num_tensors, "tensor") << ", "
            << count_text(report.num_values, "other value") << ", "
            << count_text(report.num_files, "file") << ", "
            << bytes_text(report.bytes_read) << " read";
  std::cout
      << (report.has_checksums
              ? " and compared with their checksums\n"
              : "; there are no checksums, so only the structure was "
                "checked\n");
  return 0;
}

int code_of(const checkpoint::VerifyReport& report) {
  return report.is_sound() ? 0 : report.damages.empty() ? kUnsupported : 1;
}

Action add_verify(CLI::App& app) {
  struct Settings {
    std::string path;
    std::vector<std::string> exclude;
    bool json = false;
  };
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "verify", "Read everything, compare checksums, report damage");
  command->add_option("PATH", settings->path, "Folder or file")->required();
  command->add_option(
      "--exclude",
      settings->exclude,
      "Leave out this name and names below it; may be repeated");
  command->add_flag("--json", settings->json, "As JSON");
  command->footer(
      "Exit code: 0 sound, 1 damaged, 2 cannot be read, 3 not supported.");
  return [settings] {
    checkpoint::VerifyReport report;
    {
      ProgressBar bar("verifying");
      report =
          checkpoint::verify(settings->path, settings->exclude, bar.progress());
    }
    if (!settings->json) {
      return print_report(report);
    }
    std::cout << verify_json(report);
    return code_of(report);
  };
}

// ---- convert, consolidate, reshard -----------------------------------------

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
  const auto source = Source::open(settings.from);
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

// ---- diff ------------------------------------------------------------------

Action add_diff(CLI::App& app) {
  struct Settings {
    std::string a;
    std::string b;
    checkpoint::DiffOptions options;
    bool json = false;
  };
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "diff", "Compare two checkpoints of any formats, name by name");
  command->add_option("A", settings->a, "Folder or file")->required();
  command->add_option("B", settings->b, "Folder or file")->required();
  command->add_option(
      "--rtol",
      settings->options.rtol,
      "Elements may differ by atol + rtol * |b|, and dtypes may differ");
  command->add_option("--atol", settings->options.atol, "See --rtol");
  command->add_flag(
      "--equal-nan",
      settings->options.equal_nan,
      "Any NaN equals any other, whatever its bits");
  command->add_option(
      "--exclude",
      settings->options.exclude,
      "Leave out this name and names below it; may be repeated");
  command->add_flag("--json", settings->json, "As JSON");
  command->footer("Exit code: 0 the same, 1 different, 2 cannot be read.");
  return [settings] {
    const auto a = Source::open(settings->a);
    const auto b = Source::open(settings->b);
    checkpoint::DiffReport report;
    {
      ProgressBar bar("comparing");
      report = diff(*a, *b, settings->options, bar.progress());
    }
    if (settings->json) {
      std::cout << diff_json(report);
    } else {
      for (const auto& difference : report.differences) {
        std::cout << difference.name << ": " << difference.text << "\n";
      }
      std::cout << report.num_same << " the same, " << report.differences.size()
                << " different";
      if (report.num_excluded > 0) {
        std::cout << ", " << report.num_excluded << " left out";
      }
      std::cout << "\n";
    }
    return report.differences.empty() ? 0 : 1;
  };
}

} // namespace

Action add_ckpt(CLI::App& app) {
  auto* command = app.add_subcommand(
      "ckpt", "Inspect, verify, compare and convert checkpoints");
  command->require_subcommand(1);
  const std::map<std::string, Action> actions{
      {"inspect", add_inspect(*command)},
      {"verify", add_verify(*command)},
      {"convert", add_convert(*command)},
      {"diff", add_diff(*command)},
      {"consolidate", add_consolidate(*command)},
      {"reshard", add_reshard(*command)}};
  return [command, actions] {
    const std::string name = command->get_subcommands().front()->get_name();
    try {
      return actions.at(name)();
    } catch (const Interrupted& interrupted) {
      std::cerr << "tessera ckpt " << name
                << ": interrupted; nothing was written\n";
      end_by(interrupted);
    } catch (const std::exception& error) {
      std::cerr << "tessera ckpt " << name << ": " << error.what() << "\n";
      return kCannotDoIt;
    }
  };
}

} // namespace tessera::cli
