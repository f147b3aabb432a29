#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/data/sampler.h>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::data {

/// Options of Loader. All ranks pass the same, except for those below `device`.
struct TESSERA_API LoaderOptions {
  /// As in SamplerOptions.
  TORCH_ARG(int64_t, batch_size) = 1;
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(bool, shuffle) = true;
  TORCH_ARG(EpochEnd, epoch_end) = EpochEnd::Pad;
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// If off, state_dict() counts delivered batches only after commit(). For
  /// gradients that are accumulated over several batches.
  TORCH_ARG(bool, auto_commit) = true;

  /// Where batches are delivered. For a GPU, workers copy through pinned memory
  /// on a stream of their own, ahead of time. Default: where the data set's
  /// batches are.
  TORCH_ARG(std::optional<c10::Device>, device) = std::nullopt;
  /// Threads that read samples; 0 to read in next() itself. With two or more,
  /// the data set is used by several threads at once.
  TORCH_ARG(int, num_workers) = 1;
  /// How many batches are read ahead at most.
  TORCH_ARG(int, prefetch) = 2;
  /// What errors call the data set; default: its name(), or its type.
  TORCH_ARG(std::string, name) = "";
};

} // namespace tessera::data
