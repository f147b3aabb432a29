#include "learning_rate.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numbers>
#include <optional>

namespace gpt {
namespace {

using nlohmann::json;

/// The settings of the last start in a log, as far as the curve needs them.
std::optional<Settings> last_started(const std::filesystem::path& log) {
  std::ifstream file(log);
  std::optional<Settings> last;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(R"({"kind":"start",)")) {
      continue;
    }
    const auto start = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto place = json::json_pointer("/config/training");
    if (!start.is_object() || !start.contains(place)) {
      continue; // a kill tore it, or another program wrote it
    }
    const json& training = start.at(place);
    const auto number = [&](const char* name, auto& target) {
      const auto found = training.find(name);
      if (found != training.end() && found->is_number()) {
        found->get_to(target);
      }
    };
    Settings settings;
    number("steps", settings.steps);
    number("decay-steps", settings.decay_steps);
    number("warmup", settings.warmup);
    number("lr", settings.lr);
    number("min-lr", settings.min_lr);
    last = settings;
  }
  return last;
}

} // namespace

double learning_rate(const Settings& settings, int64_t step) {
  if (step < settings.warmup) {
    return settings.lr * static_cast<double>(step + 1) /
        static_cast<double>(settings.warmup);
  }
  const auto falling =
      std::max<int64_t>(1, settings.last_decay_step() - settings.warmup);
  const double share = std::min(
      1.0,
      static_cast<double>(step - settings.warmup) /
          static_cast<double>(falling));
  const double height = 0.5 * (1 + std::cos(std::numbers::pi * share));
  return settings.min_lr + (settings.lr - settings.min_lr) * height;
}

std::string curve_change(
    const Settings& settings,
    const std::filesystem::path& log,
    int64_t step) {
  const auto before = last_started(log);
  if (!before || before->last_decay_step() == settings.last_decay_step()) {
    return ""; // other changes of the curve were asked for by its own flags
  }
  char text[320];
  std::snprintf(
      text,
      sizeof(text),
      "the learning rate now falls until step %ld, not %ld: step %ld has %.2e "
      "instead of %.2e",
      settings.last_decay_step(),
      before->last_decay_step(),
      step + 1,
      learning_rate(settings, step),
      learning_rate(*before, step));
  return settings.decay_steps > 0 ? text
                                  : std::string(text) + ". --decay-steps " +
          std::to_string(before->last_decay_step()) + " keeps the old curve.";
}

} // namespace gpt
