#include "comm/environment.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <string_view>

namespace tessera::comm {
namespace {

class Reader {
 public:
  explicit Reader(const Getenv& getenv) : getenv_(getenv) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = getenv_(name);
    return value == nullptr || *value == '\0'
        ? std::nullopt
        : std::optional<std::string>(value);
  }

  bool has(const char* name) const {
    return text(name).has_value();
  }

  std::optional<int> number(const char* name, int low, int high) const {
    const auto value = text(name);
    if (!value) {
      return std::nullopt;
    }
    int parsed = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, parsed);
    if (error != std::errc() || stop != end) {
      raise<c10::ValueError>(
          {.call = "init"},
          fmt::format(
              "{}=\"{}\" is not a whole number. Correct it, or start the program with `tessera run`, which sets it.",
              name,
              *value));
    }
    if (parsed < low || parsed > high) {
      raise<c10::ValueError>(
          {.call = "init"},
          fmt::format(
              "{}={} is outside {} to {}. Correct it, or start the program with `tessera run`, which sets it.",
              name,
              parsed,
              low,
              high));
    }
    return parsed;
  }

  int required(const char* name, int low, int high, const char* given) const {
    const auto value = number(name, low, high);
    if (!value) {
      raise<c10::ValueError>(
          {.call = "init"},
          fmt::format(
              "{} is set but {} is not, so this process cannot know its place. Set both, or neither to run alone.",
              given,
              name));
    }
    return *value;
  }

 private:
  const Getenv& getenv_;
};

constexpr int kMaxWorld = 1 << 24;

/// Variable names of one launcher.
struct Variables {
  std::string_view launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size; // how many ranks this host has; may be null
};

constexpr Variables kTorchrun{
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE"};
constexpr Variables kOpenMpi{
    "OpenMPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Variables kSlurm{
    "Slurm",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    nullptr};
constexpr Variables kPmi{
    "PMI",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS"};

/// The step of a Slurm job that started this process as one of its tasks.
/// Nothing in a batch script or in the shell of salloc: both run alone, though
/// SLURM_NTASKS and SLURM_PROCID are set there. The shell of salloc may have a
/// step of its own, whose number is above every number that srun gives out.
std::optional<std::string> find_slurm_step(const Reader& reader) {
  auto step = reader.text("SLURM_STEP_ID");
  if (!step) {
    step = reader.text("SLURM_STEPID");
  }
  constexpr uint32_t kFirstReserved = 0xfffffff0;
  uint32_t number = 0;
  const bool is_number = step &&
      std::from_chars(step->data(), step->data() + step->size(), number).ec ==
          std::errc();
  return is_number && number < kFirstReserved ? step : std::nullopt;
}

bool is_slurm_task(const Reader& reader) {
  return reader.has("SLURM_PROCID") && find_slurm_step(reader).has_value();
}

std::optional<Variables> find_launcher(const Reader& reader) {
  if (reader.has("RANK") || reader.has("WORLD_SIZE")) {
    return kTorchrun;
  }
  if (reader.has("OMPI_COMM_WORLD_RANK")) {
    return kOpenMpi;
  }
  // MPICH starts its helpers with srun, so its ranks have the variables of that
  // step too; srun's own PMI does not set MPI_LOCALRANKID.
  if (reader.has("PMI_RANK") && reader.has("MPI_LOCALRANKID")) {
    return kPmi;
  }
  if (is_slurm_task(reader)) {
    return kSlurm;
  }
  if (reader.has("PMI_RANK")) {
    return kPmi;
  }
  return std::nullopt;
}

/// The job id from the launcher's own variables only: the job id of Slurm says
/// nothing if another launcher started the ranks inside that job.
std::string find_job_id(const Reader& reader, std::string_view launcher) {
  if (launcher == kOpenMpi.launcher) {
    for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
      if (auto value = reader.text(name)) {
        return *value;
      }
    }
    return "";
  }
  const auto job = reader.text("SLURM_JOB_ID");
  const auto step = find_slurm_step(reader);
  if (launcher == kPmi.launcher || !job || !step) {
    return "";
  }
  // A job that was put back into the queue numbers its steps from 0 again.
  const auto requeues = reader.text("SLURM_RESTART_COUNT");
  return *job + "." + *step + (requeues ? "." + *requeues : "");
}

/// Whether the launcher says that all ranks are on this host.
bool is_on_one_host(
    const Reader& reader,
    const Variables& variables,
    int world_size) {
  if (variables.local_world_size != nullptr &&
      reader.has(variables.local_world_size)) {
    return reader.number(variables.local_world_size, 1, kMaxWorld) ==
        world_size;
  }
  if (variables.launcher == kPmi.launcher) {
    return false; // the launcher does not say, and nothing else does
  }
  // torchrun's ranks may be tasks of Slurm that somebody renamed.
  for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}) {
    if (is_slurm_task(reader) && reader.has(name)) {
      return reader.number(name, 1, kMaxWorld) == 1;
    }
  }
  return true;
}

} // namespace

Environment read_environment(const Getenv& getenv) {
  const Reader reader(getenv);
  Environment environment;
  const auto variables = find_launcher(reader);
  if (!variables) {
    environment.launcher = "none";
    return environment;
  }
  const bool has_rank = reader.has(variables->rank);
  const char* given = has_rank ? variables->rank : variables->world_size;
  environment.launcher = variables->launcher;
  environment.world_size =
      reader.required(variables->world_size, 1, kMaxWorld, given);
  environment.rank = reader.required(variables->rank, 0, kMaxWorld, given);
  if (environment.rank >= environment.world_size) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "{}={} but {}={}: ranks count from 0 to {}. Correct the one that is wrong.",
            variables->rank,
            environment.rank,
            variables->world_size,
            environment.world_size,
            environment.world_size - 1));
  }
  environment.local_rank = reader.number(variables->local_rank, 0, kMaxWorld)
                               .value_or(environment.rank);
  environment.master_addr = reader.text("MASTER_ADDR");
  environment.master_port = reader.number("MASTER_PORT", 1, 65535);
  environment.store_is_hosted =
      reader.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  environment.restart_count =
      reader.number("TORCHELASTIC_RESTART_COUNT", 0, kMaxWorld).value_or(0);
  environment.job_id = find_job_id(reader, variables->launcher);
  environment.one_host =
      is_on_one_host(reader, *variables, environment.world_size);
  return environment;
}

} // namespace tessera::comm
