// `tessera ckpt inspect`, `verify` and `diff`: what a checkpoint has, whether
// it is sound, and how two differ.
#include <CLI/CLI.hpp>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/diff.h"
#include "checkpoint/tools/inspect.h"
#include "checkpoint/tools/verify.h"
#include "cli/ckpt_commands.h"
#include "cli/progress_bar.h"

namespace tessera::cli {
namespace {

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
    return CkptExit::kUnsupported;
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
  return report.is_sound()     ? 0
      : report.damages.empty() ? CkptExit::kUnsupported
                               : 1;
}

} // namespace

Action add_inspect(CLI::App& app) {
  struct Settings {
    std::string path;
    bool json = false;
    bool summary = false;
    checkpoint::InspectOptions options;
  };
  auto settings = std::make_shared<Settings>();
  auto* command = app.add_subcommand(
      "inspect", "Names, shapes, dtypes, sizes and files of a checkpoint");
  command->add_option("PATH", settings->path, "Folder or file")->required();
  command->add_flag(
      "--boxes",
      settings->options.boxes,
      "Show every stored box: the part of a tensor that one rank saved");
  auto* depth =
      command
          ->add_option(
              "--depth",
              settings->options.depth,
              "Show names of at most so many parts, and add up what is below")
          ->check(CLI::PositiveNumber);
  command
      ->add_flag(
          "--summary", settings->summary, "Show the totals only, no names")
      ->excludes(depth);
  command->add_flag(
      "--json", settings->json, "As JSON, with every name and every box");
  command->footer("1 kB is 1,000 bytes.");
  return [settings] {
    if (settings->summary) {
      settings->options.depth = 0;
    }
    const auto source = checkpoint::Source::open(settings->path);
    std::cout
        << (settings->json ? inspect_json(*source)
                           : inspect_text(*source, settings->options));
    return 0;
  };
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
    const auto a = checkpoint::Source::open(settings->a);
    const auto b = checkpoint::Source::open(settings->b);
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

} // namespace tessera::cli
