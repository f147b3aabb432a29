#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "cli/commands.h"
#include "cli/diagnosis.h"
#include "cli/style.h"

namespace tessera::cli {
namespace {

void print_fact(const std::string& name, const std::string& value) {
  std::cout << fmt::format("  {:<14}{}\n", name, value) << std::flush;
}

void print_installation(const Installation& found) {
  std::cout << "tessera " << found.version << "\n";
  print_fact(
      "LibTorch",
      fmt::format("{} in {}", found.libtorch_version, found.libtorch_folder));
  print_fact("cores", std::to_string(found.cores));
  print_fact(
      "devices",
      found.cuda_devices > 0
          ? fmt::format("{} CUDA device(s)", found.cuda_devices)
          : "no CUDA device (CPU training works)");
  print_fact(
      "NCCL",
      found.has_nccl
          ? "built in"
          : "not built in (needs a LibTorch with CUDA, and nccl.h, when Tessera is built)");
  print_fact("neighbours", found.neighbours);
}

void print_result(const CheckResult& result, const Style& style) {
  if (result.works) {
    print_fact(
        result.name,
        style.good("ok") + (result.text.empty() ? "" : ": " + result.text));
    return;
  }
  print_fact(result.name, style.bad("FAILS") + ": " + result.text);
  print_fact("", style.heading("fix") + ": " + result.fix);
}

std::string json_of(
    const Installation& found,
    const std::vector<CheckResult>& results,
    bool all_is_well) {
  nlohmann::ordered_json json{
      {"tessera", found.version},
      {"libtorch",
       {{"version", found.libtorch_version},
        {"folder", found.libtorch_folder}}},
      {"cores", found.cores},
      {"cuda_devices", found.cuda_devices},
      {"nccl", found.has_nccl},
      {"neighbours", found.neighbours},
      {"checks", nlohmann::ordered_json::array()},
      {"all_is_well", all_is_well}};
  for (const CheckResult& result : results) {
    nlohmann::ordered_json check{
        {"name", result.name}, {"works", result.works}, {"text", result.text}};
    if (!result.works) {
      check["fix"] = result.fix;
    }
    json["checks"].push_back(std::move(check));
  }
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
}

int examine(bool as_json) {
  const Installation found = find_installation();
  const Style style = Style::of_standard_output();
  if (!as_json) {
    print_installation(found);
  }
  const auto results = try_out_everything([&](const CheckResult& result) {
    if (!as_json) {
      print_result(result, style);
    }
  });
  const auto failures = std::count_if(
      results.begin(), results.end(), [](const CheckResult& result) {
        return !result.works;
      });
  if (as_json) {
    std::cout << json_of(found, results, failures == 0);
  } else if (failures == 0) {
    std::cout << style.good("All is well.")
              << " Next: tessera run -n 2 PROGRAM\n";
  } else {
    std::cout << style.bad(fmt::format(
                     "{} of {} checks failed.", failures, results.size()))
              << "\n";
  }
  return failures == 0 ? 0 : 1;
}

} // namespace

Action add_doctor(CLI::App& app) {
  struct Flags {
    bool as_rank = false;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand(
      "doctor", "Check the installation and say how to fix problems");
  command->add_flag("--json", flags->json, "Print JSON");
  // For the doctor's own use, so not in the help.
  command->add_flag(kAsRank, flags->as_rank)->group("");
  command->footer("Exit code: 0 all is well, 1 something does not work.");
  return [flags] {
    return flags->as_rank ? be_a_rank_of_the_diagnosis() : examine(flags->json);
  };
}

} // namespace tessera::cli
