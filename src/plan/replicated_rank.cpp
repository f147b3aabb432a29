#include "plan/replicated_rank.h"

#include <algorithm>
#include <utility>

#include "plan/buckets.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

constexpr int64_t kStepBytes = 4;
constexpr int64_t kCountsBytes = 24; // from each rank, see Reducer::settle()

} // namespace

ReplicatedRank::ReplicatedRank(
    const Model& model,
    const TrainingSetup& setup,
    Account& account)
    : setup_(setup), account_(account) {
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    first_of_.push_back(params_.size());
    for (const plan::Param& param : model.kind_of(unit).params) {
      const format::DType dtype = setup.shard_dtype(param);
      const int64_t bytes = times(param.numel(), format::element_bytes(dtype));
      params_.push_back({.bytes = bytes, .dtype = dtype});
      bytes_ = plus(bytes_, bytes);
    }
  }
  account_.device.add(Kind::Shards, bytes_);
  std::vector<int64_t> sizes;
  for (const Param& param : params_) {
    sizes.push_back(param.bytes);
  }
  if (setup.engine != Engine::Zero) {
    owned_ = {bytes_, std::move(sizes)};
    return;
  }
  const auto parts = parts_of(std::move(sizes), setup.world());
  const auto largest = std::max_element(
      parts.begin(), parts.end(), [](const Part& a, const Part& b) {
        return a.bytes < b.bytes;
      });
  if (largest != parts.end()) {
    owned_ = *largest;
  }
  sent_bytes_ = bytes_;
  num_sends_ = setup.device == Device::Cpu ? 1 : num_broadcasts(parts);
}

void ReplicatedRank::add_gradient(size_t unit, size_t param) {
  const size_t number = first_of_[unit] + param;
  Param& one = params_[number];
  if (one.has_gradient || one.came) { // added to the one that is there
    account_.device.touch(Kind::Gradients, one.bytes);
  } else {
    account_.device.add(Kind::Gradients, one.bytes);
  }
  if (reduces_ && !has_buckets_ && setup_.world() > 1) {
    account_.device.add(Kind::Buffers, bytes_);
    has_buckets_ = true;
  }
  if (!one.came) {
    order_.push_back(number);
  }
  one.has_gradient = true;
  one.came = true;
}

void ReplicatedRank::end_backward() {
  std::vector<BucketItem> items;
  for (const size_t param : order_) {
    items.push_back({params_[param].bytes, params_[param].dtype});
    params_[param].came = false;
  }
  order_.clear();
  if (!reduces_) {
    return;
  }
  for (const int64_t bytes : buckets_of(items)) {
    account_.wire.count(Operation::AllReduce, bytes, setup_.world());
  }
  account_.wire.count(
      Operation::Agreement,
      times(kCountsBytes, setup_.world()),
      setup_.world());
}

void ReplicatedRank::step() {
  const int64_t like_params = owned_.bytes;
  const auto num_params = static_cast<int64_t>(owned_.params.size());
  account_.wire.count(
      Operation::SendParams, sent_bytes_, setup_.world(), num_sends_);
  if (!has_state_) {
    has_state_ = true;
    account_.device.add(
        Kind::Optimizer,
        plus(
            times(like_params, states_of(setup_.optimizer)),
            counts_steps(setup_.optimizer) ? kStepBytes * num_params : 0));
  }
  account_.device.touch(
      Kind::Optimizer,
      times(like_params, temporaries_of(setup_.optimizer, setup_.device)));
  for (Param& param : params_) {
    if (param.has_gradient) {
      account_.device.drop(Kind::Gradients, param.bytes);
    }
    param.has_gradient = false;
  }
}

} // namespace tessera::plan
