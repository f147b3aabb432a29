// What a launcher told this process about its place among the others.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace tessera::comm {

struct Environment {
  std::string launcher; // "torchrun", "OpenMPI", "Slurm", "PMI" or "none"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  bool store_is_hosted = false; // by the launcher, not by rank 0
  int restart_count = 0;
  /// The same on all processes of a job and on no other process; empty if the
  /// launcher does not say (MPICH: see comm/launcher_process.h).
  std::string job_id;
  /// True where the launcher says that all ranks are on this host.
  bool one_host = true;
};

using Getenv = std::function<const char*(const char*)>;

/// Reads the variables of `tessera run` and torchrun, OpenMPI, MPICH, Slurm or
/// another PMI launcher, in this order; without any of them the process is
/// alone. Throws c10::ValueError that names the variable when a value is
/// missing, not a number or out of range.
Environment read_environment(const Getenv& getenv);

} // namespace tessera::comm
