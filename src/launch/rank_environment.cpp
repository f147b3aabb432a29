#include "launch/rank_environment.h"

#include <unistd.h>

#include <map>

namespace tessera::launch {
namespace {

using Variables = std::map<std::string, std::string>;

constexpr const char* kLive = "TESSERA_LIVE";

Variables computed_variables(
    const RunOptions& options,
    const Endpoint& endpoint,
    int attempt,
    int local_rank) {
  const std::string rank = std::to_string(options.global_rank(local_rank));
  const std::string world_size = std::to_string(options.world_size());
  return {
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world_size},
      {"LOCAL_WORLD_SIZE", std::to_string(options.ranks_per_node)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.num_nodes)},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world_size},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", endpoint.address},
      {"MASTER_PORT", std::to_string(endpoint.port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", options.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
  };
}

void set_thread_counts(const RunOptions& options, Variables* variables) {
  if (options.cpu_threads) {
    const std::string count = std::to_string(*options.cpu_threads);
    (*variables)["OMP_NUM_THREADS"] = count;
    (*variables)["MKL_NUM_THREADS"] = count;
  } else if (!variables->contains("OMP_NUM_THREADS")) {
    const std::string count =
        std::to_string(default_cpu_threads(options.ranks_per_node));
    (*variables)["OMP_NUM_THREADS"] = count;
    variables->emplace("MKL_NUM_THREADS", count);
  }
}

} // namespace

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

bool is_computed_variable(const std::string& name) {
  return computed_variables(RunOptions{}, Endpoint{}, 0, 0).contains(name);
}

std::vector<std::string> rank_environment(
    const RunOptions& options,
    const std::vector<std::string>& base,
    const Endpoint& endpoint,
    int attempt,
    int local_rank,
    int live_columns) {
  Variables variables;
  for (const std::string& entry : base) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos && equals > 0) {
      variables.emplace(entry.substr(0, equals), entry.substr(equals + 1));
    }
  }
  for (const auto& [name, value] : options.extra_env) {
    variables[name] = value;
  }
  set_thread_counts(options, &variables);
  for (const auto& [name, value] :
       computed_variables(options, endpoint, attempt, local_rank)) {
    variables[name] = value;
  }
  variables.erase(kLive); // of a launcher around this one
  if (live_columns > 0) {
    variables[kLive] = std::to_string(live_columns);
  }

  std::vector<std::string> result;
  result.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    result.push_back(name + "=" + value);
  }
  return result;
}

} // namespace tessera::launch
