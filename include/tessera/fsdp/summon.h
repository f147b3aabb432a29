#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

/// Options of summon_full_params(), with Python's names and defaults.
struct TESSERA_API SummonOptions {
  /// All units below the module too, not only its own.
  TORCH_ARG(bool, recurse) = true;
  /// Changes to the parameters are kept: each rank writes its part back.
  TORCH_ARG(bool, writeback) = true;
  /// Show full parameters on rank 0 of the group only; the other ranks keep
  /// their shards.
  TORCH_ARG(bool, rank0_only) = false;
  /// Show full parameters in host memory.
  TORCH_ARG(bool, offload_to_cpu) = false;
  /// Show full gradients too, if any rank has one. With writeback, changes to
  /// them are kept.
  TORCH_ARG(bool, with_grads) = false;
};

/// The scope in which parameters are shown; see summon_full_params.
class [[nodiscard]] TESSERA_API SummonGuard {
 public:
  SummonGuard(SummonGuard&& other) noexcept;
  SummonGuard& operator=(SummonGuard&& other) = delete;
  /// Closes the scope. Errors are only logged: call close() to get them.
  ~SummonGuard();

  /// Writes back and restores what was shown before. Collective. Further calls
  /// do nothing.
  void close();

 private:
  struct Data;
  explicit SummonGuard(std::unique_ptr<Data> data);
  friend SummonGuard summon_full_params(
      ModuleRef module,
      const SummonOptions& options);

  std::unique_ptr<Data> data_;
};

/// Shows the whole parameters, in full precision, as leaves of the module that
/// may be read and written, until the guard is closed: of all units in the
/// module, or of its own only. A unit that was gathered before is gathered
/// afterwards, except under mixed precision. If nothing is sharded (one rank
/// has everything) and nothing is offloaded, the parameters themselves are
/// shown, and changes are kept without writeback too. Collective.
///
/// Throws before anything is shown: c10::NotImplementedError for writeback with
/// rank0_only, with_grads with offload_to_cpu or without use_orig_params, and
/// offload_to_cpu if nothing is sharded; c10::Error inside the forward of an
/// FSDP handle, in backward, and inside another guard on the same unit.
TESSERA_API SummonGuard
summon_full_params(ModuleRef module, const SummonOptions& options = {});

} // namespace tessera
