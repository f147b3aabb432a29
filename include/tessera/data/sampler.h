#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/group.h>
#include <tessera/data/order.h>
#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// [Note: positions]
///
/// An epoch is one list of samples, the same for every number of ranks. A
/// position in the list is a count of samples that all ranks together have
/// taken from the list. With R ranks and batches of B samples per rank, the
/// ranks take the next R * B samples: rank r takes B of them, beginning with
/// number r * B. So a run may stop at any position and resume with another
/// number of ranks or another batch size: every sample of the epoch is taken
/// exactly once, except for what EpochEnd says of the last samples.

/// A place in a run over all its epochs; equal on all ranks.
struct TESSERA_API Position {
  int64_t epoch = 0; // from 0
  /// Samples of the epoch that all ranks together have taken.
  int64_t samples = 0;

  bool operator==(const Position&) const = default;
};

/// What becomes of the last samples of an epoch, which are too few for a full
/// batch on every rank.
enum class EpochEnd {
  /// They are left out. All batches are full.
  Drop,
  /// They are divided evenly; the first samples of the epoch are repeated to
  /// make the division even (fewer samples than there are ranks). All ranks
  /// have the same number of batches; the last batch may be smaller.
  Pad,
  /// They are divided as evenly as their number allows. Nothing is repeated;
  /// a rank may have a sample, and a batch, less than other ranks: see Join.
  /// When some ranks have no batch left and others have their last one, all
  /// ranks are at the beginning of the next epoch, and a checkpoint of that
  /// moment resumes there.
  Uneven,
  /// The next epoch fills the batch. All batches are full and no sample is left
  /// out or repeated; an epoch does not end for the caller. For loops over
  /// steps.
  Continue,
};

/// Options of DistributedSampler. All ranks pass the same.
struct TESSERA_API SamplerOptions {
  /// Samples per rank and batch.
  TORCH_ARG(int64_t, batch_size) = 1;
  /// Decides all orders, together with the epoch.
  TORCH_ARG(uint64_t, seed) = 0;
  /// If off, every epoch has the order of the data set.
  TORCH_ARG(bool, shuffle) = true;
  /// What becomes of the last samples of an epoch.
  TORCH_ARG(EpochEnd, epoch_end) = EpochEnd::Pad;
  /// The ranks that divide the samples; default: the world, or this process
  /// alone before init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// This rank's part of the next samples.
struct TESSERA_API Share {
  /// The indices of the samples, in order.
  std::vector<int64_t> indices;
  /// How many of the indices, counted from the first, are not repeats of
  /// EpochEnd::Pad.
  int64_t num_fresh = 0;
};

/// Divides the samples of each epoch over the ranks. Every epoch has an order
/// of its own; epochs advance by themselves.
///
///   DistributedSampler sampler(images.size(), SamplerOptions().batch_size(8));
///   for (int epoch = 0; epoch < 3; ++epoch) {
///     while (auto share = sampler.next()) { ... share->indices ... }
///   }
///
/// Loader has one inside. Only the constructor is collective. Not thread-safe.
class TESSERA_API DistributedSampler : public checkpoint::Stateful {
 public:
  /// Samples 0 to `size` - 1, or an order of the user's own. Throws
  /// c10::ValueError on all ranks for a batch size below 1, and if
  /// EpochEnd::Drop would drop whole epochs; DisagreementError if ranks pass
  /// different orders or options. Collective over the group.
  explicit DistributedSampler(int64_t size, const SamplerOptions& options = {});
  explicit DistributedSampler(
      std::shared_ptr<const Order> order,
      SamplerOptions options = {});

  /// This rank's next samples; nothing, once, at the end of the epoch. The call
  /// after that begins the next epoch. Not collective, but ranks that train
  /// together call it equally often.
  std::optional<Share> next();

  /// Counts everything that next() has given.
  Position position() const {
    return position_;
  }
  /// Continues at `position`. Throws c10::ValueError if there is no such place.
  void seek(Position position);
  /// Continues at the beginning of an epoch. Not needed, since epochs advance
  /// by themselves.
  void set_epoch(int64_t epoch) {
    seek({epoch, 0});
  }

  /// Samples in an epoch, over all ranks.
  int64_t size() const {
    return order_->size();
  }
  /// Batches of this rank in a whole epoch, and in the rest of the epoch from
  /// `position` on. Throw c10::ValueError for EpochEnd::Continue, where epochs
  /// do not end.
  int64_t batches_per_epoch() const;
  int64_t batches_left(Position position) const;

  /// The position, and the identity of the order.
  StateDict state_dict() override;
  /// The same for another position.
  StateDict state_at(Position position) const;
  /// Seeks. Throws c10::ValueError, with the position as it was, if the state
  /// was saved for another order.
  void load_state_dict(const StateDict& state) override;
  void check_state_dict(const StateDict& state) const override;

 protected:
  /// `call` is what errors name: the sampler of a Loader is not the user's own.
  DistributedSampler(
      std::shared_ptr<const Order> order,
      SamplerOptions options,
      std::string call);

 private:
  ErrorSite site() const;
  void check_position(Position position) const;

  std::string call_; // in errors
  std::shared_ptr<const Order> order_;
  SamplerOptions options_;
  int rank_ = 0;
  int num_ranks_ = 1;
  Position position_;
  bool end_is_due_ = false; // next() returns nothing at this position first
};

/// The order that a loader or sampler of `size` samples has.
TESSERA_API std::shared_ptr<const Order> default_order(
    int64_t size,
    uint64_t seed,
    bool shuffle);

} // namespace tessera::data
