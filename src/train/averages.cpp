#include "train/averages.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <unordered_set>

#include "comm/raw_access.h"
#include "engine/list_parameters.h"
#include "transfer/state_entries.h"

namespace tessera::train {
namespace {

constexpr const char* kAverages = "AveragedModel";

std::vector<const Average*> with_elements(const std::vector<Average>& items) {
  std::vector<const Average*> pointers;
  for (const Average& item : items) {
    if (item.current.numel() != 0) {
      pointers.push_back(&item);
    }
  }
  return pointers;
}

void exchange_one(const Average& item) {
  if (item.current.numel() == 0) {
    // The engine sees the operators of the other ranks, so it must see this
    // rank's write of nothing.
    comm::before_raw_write(item.current, kAverages);
    return;
  }
  const at::Tensor held = at::empty_like(item.average);
  held.copy_(item.current);
  item.current.copy_(item.average);
  item.average.copy_(held);
}

} // namespace

Averages::Averages(torch::nn::Module& model, AveragedModelOptions options)
    : model_(model), options_(std::move(options)) {
  if (!options_.multi_avg_fn()) {
    options_.multi_avg_fn(get_swa_multi_avg_fn());
  }
  at::NoGradGuard no_grad;
  for (const auto& [name, leaf] : engine::list_parameters(model_)) {
    params_.push_back(begin(name, leaf));
  }
  for (const auto& [name, buffer] : model_buffers()) {
    buffers_.push_back(begin(name, buffer));
  }
}

Average Averages::begin(const std::string& name, const at::Tensor& current)
    const {
  if (current.is_meta()) {
    raise<c10::ValueError>(
        {.call = kAverages, .parameter = name},
        "still on the meta device. Give the model memory and values first.");
  }
  at::Tensor average = at::empty(
      current.sizes(),
      at::TensorOptions(current.scalar_type())
          .device(options_.device().value_or(current.device())));
  average.copy_(current);
  return {name, current, std::move(average)};
}

/// Each once, under its first name.
Averages::Named Averages::model_buffers() const {
  Named buffers;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : transfer::state_entries(model_)) {
    if (entry.is_buffer &&
        seen.insert(entry.tensor.unsafeGetTensorImpl()).second) {
      buffers.emplace_back(entry.name, entry.tensor);
    }
  }
  return buffers;
}

void Averages::update(int64_t before) {
  at::NoGradGuard no_grad;
  std::vector<const Average*> averaged = with_elements(params_);
  std::vector<const Average*> copied = with_elements(buffers_);
  if (options_.use_buffers()) {
    averaged.insert(averaged.end(), copied.begin(), copied.end());
    copied.clear();
  }
  if (before == 0) {
    copied.insert(copied.end(), averaged.begin(), averaged.end());
  } else {
    take_average(averaged, before);
  }
  for (const Average* item : copied) {
    item->average.copy_(item->current);
  }
}

/// Calls the function for tensors of one dtype and device at a time.
void Averages::take_average(
    const std::vector<const Average*>& items,
    int64_t before) {
  struct Batch {
    std::vector<at::Tensor> averaged;
    std::vector<at::Tensor> current;
  };
  std::vector<Batch> batches;
  for (const Average* item : items) {
    const auto found =
        std::find_if(batches.begin(), batches.end(), [&](const Batch& batch) {
          const at::Tensor& first = batch.averaged.front();
          return first.scalar_type() == item->average.scalar_type() &&
              first.device() == item->average.device();
        });
    Batch& batch = found == batches.end() ? batches.emplace_back() : *found;
    batch.averaged.push_back(item->average);
    batch.current.push_back(item->current.to(item->average.device()));
  }
  for (const Batch& batch : batches) {
    options_.multi_avg_fn()(batch.averaged, batch.current, before);
  }
}

void Averages::exchange() {
  at::NoGradGuard no_grad;
  std::vector<const Average*> done;
  try {
    for (const auto* items : {&params_, &buffers_}) {
      for (const Average& item : *items) {
        exchange_one(item);
        done.push_back(&item);
      }
    }
  } catch (...) {
    for (const Average* item : done) {
      exchange_one(*item);
    }
    throw;
  }
}

void Averages::check_same_tensors() const {
  const auto differ = [](const Named& now, const std::vector<Average>& known) {
    return now.size() != known.size() ||
        !std::equal(
               now.begin(),
               now.end(),
               known.begin(),
               [](const auto& one, const Average& other) {
                 return one.second.is_same(other.current);
               });
  };
  if (differ(engine::list_parameters(model_), params_) ||
      differ(model_buffers(), buffers_)) {
    raise(
        {.call = kAverages},
        "the model's parameters or buffers are other tensors than those that averages were made of. Make the AveragedModel after the model is sharded and moved to its device, and use it outside summon_full_params.");
  }
}

} // namespace tessera::train
