#include "comm/settings.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string>

namespace tessera::comm {
namespace {

constexpr Milliseconds kDefaultTimeout = std::chrono::minutes(10);
/// Thirty years, which can still be added to a time.
constexpr Milliseconds kLongestTimeout = std::chrono::seconds(1'000'000'000);

Milliseconds timeout_from(const InitOptions& options) {
  if (options.timeout()) {
    if (options.timeout()->count() <= 0) {
      raise<c10::ValueError>(
          {.call = "init"}, "the timeout must be longer than zero.");
    }
    return std::min(*options.timeout(), kLongestTimeout);
  }
  const char* text = std::getenv("TESSERA_TIMEOUT");
  if (text == nullptr || *text == '\0') {
    return kDefaultTimeout;
  }
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0.001) || seconds > 1e9) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_TIMEOUT=\"{}\" is not a number of seconds, 0.001 or more. Correct or unset it.",
            text));
  }
  return Milliseconds(static_cast<int64_t>(seconds * 1000));
}

bool compare_calls_setting() {
  const char* text = std::getenv("TESSERA_CHECK");
  const std::string value = text == nullptr ? "" : text;
  if (!value.empty() && value != "0" && value != "1") {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format("TESSERA_CHECK=\"{}\" must be 0 or 1.", value));
  }
  return value == "1";
}

/// The backend of the options; "auto" leaves it to TESSERA_BACKEND.
BackendChoice backend_from(const InitOptions& options) {
  const auto chosen = find_backend(options.backend());
  if (!chosen) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "there is no backend \"{}\"; choose auto, shm, gloo, nccl or fake.",
            options.backend()));
  }
  const char* text = std::getenv("TESSERA_BACKEND");
  if (*chosen != BackendChoice::Auto || text == nullptr || *text == '\0') {
    return *chosen;
  }
  // Not "fake": a variable must not turn training into pretence.
  const auto of_variable = find_backend(text);
  if (!of_variable || *of_variable == BackendChoice::Fake) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_BACKEND=\"{}\" is not one of auto, shm, gloo and nccl. Correct or unset it.",
            text));
  }
  return *of_variable;
}

} // namespace

Environment settle_environment(const InitOptions& options) {
  Environment environment;
  // If the options give rank and size, the environment's are not read.
  if (options.rank() && options.world_size()) {
    environment.launcher = "InitOptions";
  } else {
    environment = read_environment(std::getenv);
  }
  environment.rank = options.rank().value_or(environment.rank);
  environment.world_size =
      options.world_size().value_or(environment.world_size);
  environment.local_rank = options.local_rank().value_or(
      environment.launcher == "InitOptions" ? environment.rank
                                            : environment.local_rank);
  if (options.master_addr()) {
    environment.master_addr = options.master_addr();
  }
  if (options.master_port()) {
    environment.master_port = options.master_port();
  }
  environment.store_is_hosted =
      options.store_is_hosted().value_or(environment.store_is_hosted);
  if (environment.world_size < 1 || environment.rank < 0 ||
      environment.rank >= environment.world_size) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "rank {} of a world of {}: ranks count from 0 to world_size - 1.",
            environment.rank,
            environment.world_size));
  }
  return environment;
}

/// Nothing pretends to be slow but what pretends anyway.
WireSpeed fake_wire_from(const InitOptions& options, BackendChoice backend) {
  WireSpeed speed;
  const double bandwidth = options.fake_bandwidth();
  const double latency = options.fake_latency();
  if (!(std::isfinite(bandwidth) && bandwidth >= 0) ||
      !(std::isfinite(latency) && latency >= 0)) {
    raise<c10::ValueError>(
        {.call = "init"},
        "fake_bandwidth and fake_latency: expected bytes per second and seconds, 0 or more.");
  }
  if ((bandwidth > 0 || latency > 0) && backend != BackendChoice::Fake) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "fake_bandwidth and fake_latency belong to the backend \"fake\"; this is \"{}\".",
            name_of(backend)));
  }
  if (bandwidth > 0) {
    speed.bytes_per_second = bandwidth;
  }
  speed.latency_seconds = latency;
  return speed;
}

std::shared_ptr<WorldInfo> read_settings(
    const InitOptions& options,
    const Environment& environment) {
  auto info = std::make_shared<WorldInfo>();
  info->rank = environment.rank;
  info->local_rank = environment.local_rank;
  info->backend = backend_from(options);
  info->fake_wire = fake_wire_from(options, info->backend);
  info->timeout = timeout_from(options);
  info->compare_calls = compare_calls_setting();
  info->host_of.assign(static_cast<size_t>(environment.world_size), 0);
  return info;
}

} // namespace tessera::comm
