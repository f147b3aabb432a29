#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/data/order.h>
#include <tessera/data/sampler.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <typeinfo>

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
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// Threads that read samples; 0 to read in next() itself. With two or more,
  /// the data set is used by several threads at once.
  TORCH_ARG(int, num_workers) = 1;
  /// How many batches are read ahead at most.
  TORCH_ARG(int, prefetch) = 2;
  /// What errors call the data set; default: its name(), or its type.
  TORCH_ARG(std::string, name) = "";
};

namespace detail {

/// What Loader knows of its data set and its batches.
struct LoaderParts {
  std::string name;
  /// Makes a batch. Keeps the index of the sample that is being read in
  /// `current`, -1 if the batch is not read sample by sample.
  std::function<
      std::shared_ptr<void>(std::span<const int64_t> indices, int64_t& current)>
      make;
  /// "sample 3 of source "books""; may be empty.
  std::function<std::string(int64_t index)> describe;
  /// Visits the tensors of a batch; empty if they are not known.
  std::function<void(void* batch, const std::function<void(at::Tensor&)>&)>
      visit;
};

/// Loader without its types; not part of the public contract.
class TESSERA_API LoaderCore {
 public:
  LoaderCore(
      const std::function<std::shared_ptr<const Order>()>& make_order,
      const LoaderOptions& options,
      LoaderParts parts);
  ~LoaderCore();
  LoaderCore(const LoaderCore&) = delete;
  LoaderCore& operator=(const LoaderCore&) = delete;

  /// Null at the end of an epoch.
  std::shared_ptr<void> next();
  int64_t num_fresh() const;
  void commit();
  Position committed() const;
  Position delivered() const;
  void seek(Position position);
  const DistributedSampler& sampler() const;
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The name of a type as the compiler writes it.
TESSERA_API std::string type_name(const std::type_info& type);

} // namespace detail

} // namespace tessera::data
