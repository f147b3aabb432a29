#include "train/memory_census.h"

#include <tessera/optim/state_dict.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "checkpoint/held_memory.h"
#include "engine/module_units.h"
#include "engine/owners.h"
#include "engine/unit_memory.h"

namespace tessera::train {
namespace {

/// The optimizer that has the state on this rank; null if there is none yet.
const torch::optim::Optimizer* state_holder(
    const torch::optim::Optimizer& optimizer) {
  const auto* zero = dynamic_cast<const ZeroRedundancyOptimizer*>(&optimizer);
  if (zero == nullptr) {
    return &optimizer;
  }
  return zero->has_state() ? &zero->optim() : nullptr;
}

template <class See>
void for_each_tensor(const StateValue& value, const See& see) {
  if (value.is_tensor() && value.tensor().defined()) {
    see(value.tensor());
  } else if (value.is_list()) {
    for (const StateValue& item : value.list()) {
      for_each_tensor(item, see);
    }
  } else if (value.is_dict()) {
    for (const auto& [key, item] : value.dict()) {
      for_each_tensor(item, see);
    }
  }
}

std::vector<at::Tensor> leaves_of(
    const std::vector<std::shared_ptr<engine::Unit>>& units,
    const std::vector<at::Tensor>& plain_params) {
  std::vector<at::Tensor> leaves;
  for (const auto& unit : units) {
    for (const at::Tensor& leaf : unit->params().leaves()) {
      leaves.push_back(leaf);
    }
  }
  leaves.insert(leaves.end(), plain_params.begin(), plain_params.end());
  return leaves;
}

at::Device device_of(
    const std::vector<std::shared_ptr<engine::Unit>>& units,
    const std::vector<at::Tensor>& plain_params) {
  for (const auto& unit : units) {
    if (!unit->bundles().empty()) {
      return unit->bundles().front().full().device();
    }
  }
  return plain_params.empty() ? at::Device(at::kCPU)
                              : plain_params.front().device();
}

} // namespace

/// Adds up memory, counting each storage once.
class MemoryCensus::Stock {
 public:
  Stock(
      at::Device device,
      IsCounted is_counted,
      std::unordered_map<const c10::StorageImpl*, bool>& was_counted)
      : device_(device), is_counted_(is_counted), was_counted_(was_counted) {}

  Sum take(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() ||
        tensor.device() != device_ ||
        !seen_.insert(engine::storage_of(tensor)).second) {
      return {};
    }
    const c10::StorageImpl* storage = engine::storage_of(tensor);
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    const bool counted = find_out(*storage);
    return {bytes, counted ? bytes : 0};
  }

 private:
  /// For memory that is shared until somebody writes, the owner is not visible.
  bool find_out(const c10::StorageImpl& storage) {
    bool& known = was_counted_[&storage];
    if (!c10::impl::cow::is_cow_data_ptr(storage.data_ptr()) &&
        !checkpoint::is_held(storage.data_ptr())) {
      known = is_counted_(storage.data_ptr());
    }
    return known;
  }

  const at::Device device_;
  const IsCounted is_counted_;
  std::unordered_map<const c10::StorageImpl*, bool>& was_counted_;
  std::unordered_set<const c10::StorageImpl*> seen_;
};

MemoryCensus::MemoryCensus(torch::nn::Module& model, OptimizerRefs optimizers)
    : model_(model),
      optimizers_(std::move(optimizers)),
      units_(engine::units_in(model)) {
  for (const auto& param : engine::distinct_parameters(model)) {
    if (engine::unit_of(param.tensor) == nullptr) {
      plain_params_.push_back(param.tensor);
    }
  }
  leaves_ = leaves_of(units_, plain_params_);
  device_ = device_of(units_, plain_params_);
  for (const auto& unit : units_) {
    if (std::find(schedules_.begin(), schedules_.end(), &unit->schedule()) ==
        schedules_.end()) {
      schedules_.push_back(&unit->schedule());
    }
  }
}

bool MemoryCensus::is_bucket(const c10::StorageImpl* storage) const {
  bool found = false;
  for (const ddp::Reducer* reducer : reducers_) {
    reducer->for_each_bucket([&](const at::Tensor& flat) {
      found = found || engine::storage_of(flat) == storage;
    });
  }
  return found;
}

/// Gradients of leaves, as storages; those that live in buckets come with
/// these. Leaves whose gradients share memory follow each other.
template <class See>
void MemoryCensus::for_each_gradient(const See& see) const {
  const c10::StorageImpl* last = nullptr;
  for (const at::Tensor& leaf : leaves_) {
    const at::Tensor& gradient = leaf.grad();
    if (!gradient.defined() || !gradient.has_storage() ||
        gradient.device() != device_) {
      continue;
    }
    const c10::StorageImpl* storage = engine::storage_of(gradient);
    if (storage != last && !is_bucket(storage)) {
      see(*storage);
    }
    last = storage;
  }
  for (const ddp::Reducer* reducer : reducers_) {
    reducer->for_each_bucket([&](const at::Tensor& flat) {
      if (flat.device() == device_) {
        see(*engine::storage_of(flat));
      }
    });
  }
}

/// The size of the state is unchanged as long as the same number of parameters
/// have state.
MemoryCensus::Sum MemoryCensus::state_of_optimizers(IsCounted is_counted) {
  size_t num_states = 0;
  for (const torch::optim::Optimizer& optimizer : optimizers_) {
    const auto* holder = state_holder(optimizer);
    num_states += holder == nullptr ? 0 : holder->state().size();
  }
  if (num_states == num_states_ && num_states != 0) {
    return state_;
  }
  num_states_ = num_states;
  state_ = {};
  Stock stock(device_, is_counted, was_counted_);
  for (const torch::optim::Optimizer& optimizer : optimizers_) {
    const auto* holder = state_holder(optimizer);
    if (holder == nullptr) {
      continue;
    }
    try {
      const StateDict dict = optim::state_dict(*holder);
      for_each_tensor(dict.at("state"), [&](const at::Tensor& tensor) {
        const Sum sum = stock.take(tensor);
        state_.bytes += sum.bytes;
        state_.counted += sum.counted;
      });
    } catch (const c10::TypeError&) {
      // The class does not expose its state, which therefore counts as none of
      // the kinds.
    }
  }
  return state_;
}

int64_t MemoryCensus::take_stock(IsCounted is_counted) {
  reducers_.clear();
  if (!plain_params_.empty()) {
    for (const ddp::Reducer* reducer : ddp::Reducer::all()) {
      if (reducer->reduces(plain_params_.front()) ||
          reducer->reduces(plain_params_.back())) {
        reducers_.push_back(reducer);
      }
    }
  }
  stock_ = {};
  int64_t counted = 0;
  Stock stock(device_, is_counted, was_counted_);
  const auto add = [&](const at::Tensor& tensor, int64_t& kind) {
    const Sum sum = stock.take(tensor);
    kind += sum.bytes;
    counted += sum.counted;
  };
  for (const auto& unit : units_) {
    for (const engine::Bundle& bundle : unit->bundles()) {
      add(bundle.shard(), stock_.shards);
    }
  }
  for (const at::Tensor& param : plain_params_) {
    add(param, stock_.shards);
  }
  for (const at::Tensor& buffer : model_.buffers()) {
    add(buffer, stock_.other);
  }
  const Sum state = state_of_optimizers(is_counted);
  stock_.optimizer = state.bytes;
  counted += state.counted;

  for_each_gradient([&](const c10::StorageImpl& storage) {
    counted += is_counted(storage.data_ptr())
        ? static_cast<int64_t>(storage.nbytes())
        : 0;
  });
  for (const auto& unit : units_) { // created recently, so counted
    counted += static_cast<int64_t>(
        engine::full_bytes_now(*unit) + engine::gradient_bytes_now(*unit));
  }
  for (engine::Schedule* schedule : schedules_) {
    schedule->pool().for_each_idle([&](const c10::DataPtr& data, size_t bytes) {
      counted += is_counted(data) ? static_cast<int64_t>(bytes) : 0;
    });
  }
  return counted;
}

MemoryByKind MemoryCensus::now() const {
  MemoryByKind result = stock_;
  for_each_gradient([&](const c10::StorageImpl& storage) {
    result.gradients += static_cast<int64_t>(storage.nbytes());
  });
  for (const auto& unit : units_) {
    result.full += static_cast<int64_t>(engine::full_bytes_now(*unit));
    result.gradients += static_cast<int64_t>(engine::gradient_bytes_now(*unit));
  }
  for (engine::Schedule* schedule : schedules_) {
    schedule->pool().for_each_idle([&](const c10::DataPtr&, size_t bytes) {
      result.full += static_cast<int64_t>(bytes);
    });
  }
  return result;
}

} // namespace tessera::train
