#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/data/collate.h>
#include <tessera/data/dataset.h>
#include <tessera/data/loader_core.h>
#include <tessera/data/loader_options.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace tessera::data {

namespace detail {

template <class D, class Collate>
auto make_batch(
    D& dataset,
    Collate& collate,
    std::span<const int64_t> indices,
    int64_t& current) {
  if constexpr (ReadsBatches<D>) {
    return dataset.read(indices);
  } else {
    using Sample =
        std::remove_cvref_t<decltype(dataset.get(static_cast<size_t>(0)))>;
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      current = index;
      samples.push_back(dataset.get(static_cast<size_t>(index)));
    }
    current = -1;
    return collate(std::move(samples));
  }
}

} // namespace detail

/// Batches of a data set for this rank, read ahead by worker threads.
///
///   Loader loader(TokenWindows(TokenFile("train.tokens"), 128),
///                 LoaderOptions().batch_size(16).seed(1));
///   for (int epoch = 0; epoch < 3; ++epoch) {
///     while (auto batch = loader.next()) {
///       ... batch->inputs, batch->targets ...
///     }
///   }
///
/// `Dataset` has size() and one of two functions: get(index), whose samples
/// `Collate` makes a batch of (Stack stacks tensors), or
/// read(std::span<const int64_t> indices), which returns a batch. Batches come
/// in the same order for every number of workers. For positions over ranks see
/// [Note: positions].
///
/// [Note: delivered and committed]
///
/// A batch counts as delivered when next() returns it; what workers have read
/// ahead does not count. state_dict() has the position of the last commit. By
/// default each next() commits what it delivers: then a checkpoint belongs
/// between two steps, where every delivered batch has been trained on. Without
/// `auto_commit` only commit() does. Call it right after optimizer.step(): then
/// a checkpoint at any moment but between these two resumes behind the last
/// step that was made, and the batches of an unfinished accumulation are
/// delivered again.
///
/// Errors. If a data set throws, next() throws DataError when it comes to the
/// batch, with the sample and the source, and so does every later next(). The
/// group is given up: other ranks get the same text as a PeerLostError from
/// their next collective on the group; in another group or over NCCL they learn
/// of it when this process ends. No exchange is made per batch.
///
/// Only the constructor is collective. The thread that trains makes all calls;
/// the data set is used by the workers. The destructor waits for samples that
/// are being read, and never hangs otherwise.
template <class Dataset, class Collate = Stack>
requires ReadsBatches<Dataset> || ReadsSamples<Dataset>
class Loader : public checkpoint::Stateful {
 public:
  /// What next() gives.
  using Batch = std::remove_cvref_t<decltype(detail::make_batch(
      std::declval<Dataset&>(),
      std::declval<Collate&>(),
      std::declval<std::span<const int64_t>>(),
      std::declval<int64_t&>()))>;

  /// Throws as DistributedSampler's constructor does, and c10::ValueError for
  /// workers or prefetch out of range, for a device that does not exist, and
  /// for a device where the tensors of a batch are not known (see
  /// HoldsTensors). Collective over the group.
  explicit Loader(
      Dataset dataset,
      const LoaderOptions& options = {},
      Collate collate = {})
      : dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        core_([&] { return make_order(options); }, options, parts(options)) {}
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next batch; nothing, once, at the end of the epoch. The call after
  /// that begins the next epoch. On a GPU the current stream waits for the
  /// copy.
  std::optional<Batch> next() {
    const auto batch = std::static_pointer_cast<Batch>(core_.next());
    return batch ? std::optional<Batch>(std::move(*batch)) : std::nullopt;
  }
  /// How many rows of the last batch, counted from the first, are not repeats
  /// of EpochEnd::Pad. For evaluation: count only these.
  int64_t num_fresh() const {
    return core_.num_fresh();
  }

  /// All batches that were delivered have been trained on.
  void commit() {
    core_.commit();
  }
  /// The position of the last commit; delivered() is that of the last batch.
  Position position() const {
    return core_.committed();
  }
  Position delivered() const {
    return core_.delivered();
  }
  /// Continues at a position, which is committed. What was read ahead is
  /// dropped. Throws c10::ValueError if there is no such place.
  void seek(Position position) {
    core_.seek(position);
  }
  /// Continues at the beginning of an epoch. Not needed, since epochs advance
  /// by themselves.
  void set_epoch(int64_t epoch) {
    core_.seek({epoch, 0});
  }

  /// Samples in an epoch, over all ranks.
  int64_t size() const {
    return core_.sampler().size();
  }
  /// Batches of this rank in a whole epoch, and in what is left of this one.
  /// Throw c10::ValueError for EpochEnd::Continue.
  int64_t batches_per_epoch() const {
    return core_.sampler().batches_per_epoch();
  }
  int64_t batches_left() const {
    return core_.batches_left();
  }
  /// Where batches come from. Workers use it meanwhile.
  const Dataset& dataset() const {
    return dataset_;
  }

  /// See DistributedSampler: the two have the same dictionaries.
  StateDict state_dict() override {
    return core_.state_dict();
  }
  void load_state_dict(const StateDict& state) override {
    core_.load_state_dict(state);
  }
  void check_state_dict(const StateDict& state) const override {
    core_.sampler().check_state_dict(state);
  }

  /// The batches that are left of the epoch: `for (auto& batch : loader)`.
  class Iterator {
   public:
    /// What the standard library asks of an input iterator.
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    /// At the next batch.
    explicit Iterator(Loader& loader) : loader_(&loader) {
      ++*this;
    }
    /// The batch; may be moved from.
    Batch& operator*() {
      return *batch_;
    }
    /// To the next batch.
    Iterator& operator++() {
      batch_ = loader_->next();
      return *this;
    }
    /// True at the end of the epoch.
    bool operator==(std::default_sentinel_t) const {
      return !batch_;
    }

   private:
    Loader* loader_;
    std::optional<Batch> batch_;
  };
  /// See Iterator: begin() takes the next batch.
  Iterator begin() {
    return Iterator(*this);
  }
  std::default_sentinel_t end() {
    return {};
  }

 private:
  std::shared_ptr<const Order> make_order(const LoaderOptions& options) const {
    if constexpr (requires { dataset_.order(uint64_t{}, bool{}); }) {
      return dataset_.order(options.seed(), options.shuffle());
    } else {
      return default_order(
          num_samples(dataset_), options.seed(), options.shuffle());
    }
  }

  detail::LoaderParts parts(const LoaderOptions& options) {
    detail::LoaderParts parts;
    parts.name = options.name();
    if (parts.name.empty()) {
      if constexpr (requires { std::string(dataset_.name()); }) {
        parts.name = dataset_.name();
      } else {
        parts.name = detail::type_name(typeid(Dataset));
      }
    }
    parts.make = [this](std::span<const int64_t> indices, int64_t& current) {
      return std::make_shared<Batch>(
          detail::make_batch(dataset_, collate_, indices, current));
    };
    if constexpr (requires { std::string(dataset_.describe_sample(0)); }) {
      parts.describe = [this](int64_t index) {
        return dataset_.describe_sample(index);
      };
    }
    if constexpr (HoldsTensors<Batch>) {
      parts.visit = [](void* batch, const auto& visitor) {
        visit_tensors(*static_cast<Batch*>(batch), visitor);
      };
    }
    return parts;
  }

  Dataset dataset_;
  Collate collate_;
  detail::LoaderCore core_; // ends its threads before the others go
};

} // namespace tessera::data
