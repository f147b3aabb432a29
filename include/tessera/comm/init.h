#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <torch/arg.h>

#include <chrono>
#include <optional>
#include <string>

namespace tessera {

/// Settings that init() takes from the environment unless they are set here.
struct TESSERA_API InitOptions {
  /// This process's number and how many there are.
  TORCH_ARG(std::optional<int>, rank) = std::nullopt;
  TORCH_ARG(std::optional<int>, world_size) = std::nullopt;
  /// This process's number among those on its host.
  TORCH_ARG(std::optional<int>, local_rank) = std::nullopt;

  /// Where rank 0 listens for the others. On one host under mpirun or srun
  /// neither is needed.
  TORCH_ARG(std::optional<std::string>, master_addr) = std::nullopt;
  TORCH_ARG(std::optional<int>, master_port) = std::nullopt;
  /// True if somebody else (a launcher) already hosts the store there.
  TORCH_ARG(std::optional<bool>, store_is_hosted) = std::nullopt;
  /// Keeps worlds that use the same store apart; each id is good for one
  /// init(). If empty, init() counts its calls itself, and every rank must call
  /// it equally often.
  TORCH_ARG(std::string, store_prefix) = "";

  /// "auto" uses the variable TESSERA_BACKEND; without it, CPU tensors are sent
  /// over shared memory within a host and over Gloo across hosts, CUDA tensors
  /// over NCCL if each rank has a device of its own. If a host does not let its
  /// ranks share memory, all ranks of the group use Gloo, with a warning that
  /// says why. "shm" insists on shared memory: if it is not available, every
  /// rank throws. "gloo" keeps CPU tensors on Gloo; "nccl" insists on NCCL;
  /// "fake" pretends: one process, any world size, nothing is sent.
  TORCH_ARG(std::string, backend) = "auto";

  /// The network that "fake" pretends to have: how many bytes per second a rank
  /// sends while it receives as many, and how many seconds a collective takes
  /// in addition. The collectives of a group run one after another. On a CPU
  /// whoever waits for one sleeps; on a GPU one thread of a multiprocessor
  /// counts the time. This rank's part is copied to where the others' would
  /// arrive, which takes memory bandwidth. 0 means no delay.
  TORCH_ARG(double, fake_bandwidth) = 0;
  TORCH_ARG(double, fake_latency) = 0;

  /// How long joining and each collective may wait for a peer. Default: the
  /// variable TESSERA_TIMEOUT in seconds, otherwise 10 minutes.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout) = std::nullopt;
};

/// Joins the other processes and returns the group of all of them. Reads the
/// environment of `tessera run`, torchrun, mpirun (OpenMPI) or srun (Slurm);
/// without any, the process is alone: a group of one, which needs no network.
///
/// Collective over the world. Fails on every rank that can be reached when one
/// rank is missing at the timeout, claims another's number, or disagrees on
/// the world size. Ignores SIGPIPE from then on unless the program handles it,
/// since a peer's death would end the process otherwise.
TESSERA_API Group init(const InitOptions& options = {});

/// The group that init() made. Throws if there is none.
TESSERA_API Group world();

/// True between init() and shutdown().
TESSERA_API bool is_initialized();

/// Forgets the world, so that init() may be called again. Groups that are
/// still held stay usable among themselves as long as the process that hosts
/// the store (rank 0, or the launcher) runs. Not collective. Called at the end
/// of the process too.
TESSERA_API void shutdown();

/// This process's number among those on its host; 0 when alone.
TESSERA_API int local_rank();

} // namespace tessera
