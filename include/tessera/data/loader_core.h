#pragma once

#include <tessera/api.h>
#include <tessera/data/loader_options.h>
#include <tessera/data/order.h>
#include <tessera/data/sampler.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <typeinfo>

namespace tessera::data::detail {

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
  int64_t batches_left() const;
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

} // namespace tessera::data::detail
