#include <tessera/data/error.h>
#include <tessera/data/loader_core.h>

#include <c10/util/Type.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/group/group_impl.h"
#include "data/device_copier.h"
#include "data/failure_text.h"
#include "data/ranks.h"
#include "libtorch/recording.h"

namespace tessera::data::detail {
namespace {

constexpr const char* kCall = "Loader";
constexpr int kMaxWorkers = 256;
constexpr int kMaxPrefetch = 1 << 16;

LoaderOptions with_group(LoaderOptions options) {
  return options.group(group_or_world(options.group()));
}

SamplerOptions sampler_options(const LoaderOptions& options) {
  return SamplerOptions()
      .batch_size(options.batch_size())
      .seed(options.seed())
      .shuffle(options.shuffle())
      .epoch_end(options.epoch_end())
      .group(options.group());
}

void check_loader_options(
    const ErrorSite& site,
    const LoaderOptions& options,
    const LoaderParts& parts) {
  if (options.num_workers() < 0 || options.num_workers() > kMaxWorkers) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} workers: 0 to {} are possible.",
            options.num_workers(),
            kMaxWorkers));
  }
  if (options.prefetch() < 1 || options.prefetch() > kMaxPrefetch) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} batches ahead: 1 to {} are possible. Without workers nothing is read ahead.",
            options.prefetch(),
            kMaxPrefetch));
  }
  if (options.device() && !options.device()->is_cpu() && !parts.visit) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "batches of \"{}\" are to be copied to {}, but their tensors are not known. Write a function for_each_tensor(Batch&, visitor) beside the type of the batch.",
            parts.name,
            options.device()->str()));
  }
}

class LoaderSampler : public DistributedSampler {
 public:
  LoaderSampler(
      std::shared_ptr<const Order> order,
      const SamplerOptions& options)
      : DistributedSampler(std::move(order), options, kCall) {}
};

} // namespace

/// [Note: the queue of batches]
///
/// The thread that calls next() draws shares from the sampler, in order, and
/// puts a slot for each on two lists: `waiting_`, which workers take slots
/// from, and `ahead_`, from which next() delivers. A slot is on `ahead_` until
/// it is delivered, so the order does not depend on which worker is faster, and
/// the length of `ahead_` bounds what is read ahead. The end of an epoch is a
/// slot too. seek() forgets both lists; a worker finishes the slot that it has,
/// and that slot is dropped.
class LoaderCore::Impl {
 public:
  Impl(
      const std::function<std::shared_ptr<const Order>()>& make_order,
      const LoaderOptions& options,
      LoaderParts parts)
      : options_(with_group(options)),
        parts_(std::move(parts)),
        sampler_(prepare(make_order), sampler_options(options_)) {
    try {
      for (int i = 0; i < options_.num_workers(); ++i) {
        workers_.emplace_back([this] { work(); });
      }
    } catch (...) { // no more threads
      end_workers();
      throw;
    }
  }
  ~Impl() {
    end_workers();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::shared_ptr<void> next() {
    if (!failure_.empty()) {
      raise<DataError>(site(), failure_);
    }
    read_ahead();
    const SlotPtr slot = ahead_.front();
    finish(*slot);
    if (slot->error) {
      fail(*slot);
    }
    if (slot->batch) {
      copier_->finish(slot->copied, each_tensor(*slot));
    }
    ahead_.pop_front();
    // The end of an epoch is nobody's batch: a rank that got none of the last
    // samples is as far as the others.
    const bool commits =
        options_.auto_commit() || (!slot->batch && committed_ == delivered_);
    is_last_ = slot->is_last;
    delivered_ = slot->after;
    num_fresh_ = slot->share ? slot->share->num_fresh : 0;
    if (commits) {
      commit();
    }
    if (!workers_.empty()) {
      read_ahead(); // while the caller uses this batch
    }
    return slot->batch;
  }

  void seek(Position position) {
    sampler_.seek(position);
    forget_ahead();
  }

  void load_state_dict(const StateDict& state) {
    sampler_.load_state_dict(state);
    forget_ahead();
  }

  void commit() {
    committed_ = delivered_;
  }
  int64_t num_fresh() const {
    return num_fresh_;
  }
  Position committed() const {
    return committed_;
  }
  Position delivered() const {
    return delivered_;
  }
  int64_t batches_left() const {
    return is_last_ ? 0 : sampler_.batches_left(delivered_);
  }
  const DistributedSampler& sampler() const {
    return sampler_;
  }

 private:
  struct Slot {
    // Constant once the slot is on the lists.
    std::optional<Share> share; // nothing at the end of an epoch
    Position before; // of the sampler
    Position after;
    bool is_last = false; // a batch, but other ranks are told of the end

    // Touched by one worker, then by next(), `is_done` between them.
    std::shared_ptr<void> batch;
    std::optional<c10::Event> copied;
    std::exception_ptr error;
    int64_t current = -1; // the sample that was being read
    bool is_done = false; // guarded by mutex_
  };
  using SlotPtr = std::shared_ptr<Slot>;

  ErrorSite site() const {
    return site_of(kCall, options_.group());
  }

  EachTensor each_tensor(Slot& slot) const {
    return [this, &slot](const std::function<void(at::Tensor&)>& visitor) {
      if (parts_.visit) {
        parts_.visit(slot.batch.get(), visitor);
      }
    };
  }

  /// What only some ranks may fail in. Throws on all ranks.
  std::shared_ptr<const Order> prepare(
      const std::function<std::shared_ptr<const Order>()>& make_order) {
    std::shared_ptr<const Order> order;
    all_ranks_or_none(options_.group(), kCall, [&] {
      check_loader_options(site(), options_, parts_);
      copier_.emplace(options_.device().value_or(at::kCPU));
      order = make_order();
    });
    return order;
  }

  /// Fills `ahead_` up.
  void read_ahead() {
    const size_t most =
        workers_.empty() ? 1 : static_cast<size_t>(options_.prefetch());
    while (ahead_.size() < most) {
      auto slot = std::make_shared<Slot>();
      slot->before = sampler_.position();
      slot->share = sampler_.next();
      slot->after = sampler_.position();
      slot->is_last = slot->share && options_.epoch_end() == EpochEnd::Uneven &&
          slot->after.epoch != slot->before.epoch;
      slot->is_done = !slot->share;
      ahead_.push_back(slot);
      if (slot->share && !workers_.empty()) {
        MutexLock lock(mutex_);
        waiting_.push_back(slot);
        lock.unlock();
        changed_.notify_all();
      }
    }
  }

  /// Waits until the slot is done; without workers, does it.
  void finish(Slot& slot) {
    if (workers_.empty() && slot.share) {
      make(slot);
      return;
    }
    MutexLock lock(mutex_);
    while (!slot.is_done) {
      lock.wait(changed_);
    }
  }

  void make(Slot& slot) const {
    try {
      slot.batch = parts_.make(slot.share->indices, slot.current);
      slot.copied = copier_->start(each_tensor(slot));
    } catch (...) {
      slot.error = std::current_exception();
    }
  }

  /// Waits for a slot; null when the loader ends.
  SlotPtr take() {
    MutexLock lock(mutex_);
    while (!is_ending_ && waiting_.empty()) {
      lock.wait(changed_);
    }
    if (is_ending_) {
      return nullptr;
    }
    SlotPtr slot = std::move(waiting_.front());
    waiting_.pop_front();
    return slot;
  }

  void work() {
    while (const SlotPtr slot = take()) {
      make(*slot);
      MutexLock lock(mutex_);
      slot->is_done = true;
      lock.unlock();
      changed_.notify_all();
    }
  }

  void end_workers() {
    MutexLock lock(mutex_);
    is_ending_ = true;
    lock.unlock();
    changed_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  void forget_ahead() {
    MutexLock lock(mutex_);
    waiting_.clear();
    lock.unlock();
    ahead_.clear();
    failure_.clear();
    delivered_ = sampler_.position();
    committed_ = delivered_;
    is_last_ = false;
    num_fresh_ = 0;
  }

  /// Throws the slot's error here, and on the other ranks from their next
  /// collective.
  [[noreturn]] void fail(const Slot& slot) {
    failure_ = failure_text(
        parts_, slot.share->indices, slot.current, slot.before, slot.error);
    if (options_.group()) {
      options_.group()->impl().give_up(format_error(site(), failure_));
    }
    raise<DataError>(site(), failure_);
  }

  // Constant after construction.
  const LoaderOptions options_;
  const LoaderParts parts_;
  std::optional<DeviceCopier> copier_;

  // Touched by the thread that calls next().
  LoaderSampler sampler_; // ahead of what is delivered
  std::deque<SlotPtr> ahead_;
  Position delivered_;
  Position committed_;
  bool is_last_ = false; // of the epoch, though delivered_ is in the next one
  int64_t num_fresh_ = 0;
  std::string failure_; // not empty: next() throws it

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<SlotPtr> waiting_ TESSERA_GUARDED_BY(mutex_);
  bool is_ending_ TESSERA_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> workers_; // last: they use all of the above
};

LoaderCore::LoaderCore(
    const std::function<std::shared_ptr<const Order>()>& make_order,
    const LoaderOptions& options,
    LoaderParts parts)
    : impl_(std::make_unique<Impl>(make_order, options, std::move(parts))) {}

LoaderCore::~LoaderCore() = default;

std::shared_ptr<void> LoaderCore::next() {
  libtorch::refuse_in_recording(
      "Loader::next", "Pass the batch to the captured step as an input.");
  return impl_->next();
}

int64_t LoaderCore::num_fresh() const {
  return impl_->num_fresh();
}

void LoaderCore::commit() {
  impl_->commit();
}

Position LoaderCore::committed() const {
  return impl_->committed();
}

Position LoaderCore::delivered() const {
  return impl_->delivered();
}

int64_t LoaderCore::batches_left() const {
  return impl_->batches_left();
}

void LoaderCore::seek(Position position) {
  impl_->seek(position);
}

const DistributedSampler& LoaderCore::sampler() const {
  return impl_->sampler();
}

StateDict LoaderCore::state_dict() const {
  return impl_->sampler().state_at(impl_->committed());
}

void LoaderCore::load_state_dict(const StateDict& state) {
  impl_->load_state_dict(state);
}

std::string type_name(const std::type_info& type) {
  return c10::demangle(type.name());
}

} // namespace tessera::data::detail
