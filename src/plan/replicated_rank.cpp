#include "plan/replicated_rank.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "comm/group/broadcast_packing.h"
#include "ddp/bucket_packing.h"
#include "plan/checked.h"
#include "zero/owner_assignment.h"

namespace tessera::plan {
namespace {

constexpr int64_t kCountsBytes = 24; // from each rank, see Reducer::settle()

} // namespace

ReplicatedRank::ReplicatedRank(
    const Model& model,
    const TrainingSetup& setup,
    Account& account)
    : setup_(setup), account_(account) {
  add_params(model);
  account_.device.add(Kind::Shards, bytes_);
  if (setup.engine == Engine::Zero) {
    choose_owners();
  } else {
    owned_bytes_ = bytes_;
    num_owned_ = static_cast<int64_t>(params_.size());
  }
}

void ReplicatedRank::add_params(const Model& model) {
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    first_of_.push_back(params_.size());
    for (const plan::Param& param : model.kind_of(unit).params) {
      const format::DType dtype = setup_.shard_dtype(param);
      const int64_t bytes = times(param.numel(), format::element_bytes(dtype));
      params_.push_back(
          {.numel = param.numel(), .bytes = bytes, .dtype = dtype});
      bytes_ = plus(bytes_, bytes); // no sum below is larger than this one
    }
  }
}

void ReplicatedRank::choose_owners() {
  std::vector<int64_t> numels;
  for (const Param& param : params_) {
    numels.push_back(param.numel);
  }
  std::map<int64_t, std::vector<int64_t>> owned; // bytes by owner
  for (const auto& [param, rank] :
       zero::OwnerAssignment(setup_.world()).add_group(numels)) {
    owned[rank].push_back(params_[param].bytes);
  }
  for (auto& [rank, bytes] : owned) {
    const int64_t total =
        std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    if (rank == 0 || total > owned_bytes_) {
      owned_bytes_ = total;
      num_owned_ = static_cast<int64_t>(bytes.size());
    }
    std::erase(bytes, 0); // tensors without elements are not sent
    num_sends_ += static_cast<int64_t>(comm::pack_broadcasts(bytes).size());
  }
  sent_bytes_ = bytes_;
  if (setup_.device == Device::Cpu) { // ranks read each other's memory
    num_sends_ = 1;
  }
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
  if (one.came) { // complete when the last contribution came
    std::erase(order_, number);
  }
  order_.push_back(number);
  one.has_gradient = true;
  one.came = true;
  one.made_at = account_.clock.now();
}

void ReplicatedRank::end_backward() {
  std::vector<ddp::GradientSize> gradients;
  std::vector<double> made_at;
  for (const size_t param : order_) {
    made_at.push_back(params_[param].made_at);
    gradients.push_back(
        {.bytes = params_[param].bytes,
         .kind = static_cast<int64_t>(params_[param].dtype)});
    params_[param].came = false;
  }
  order_.clear();
  if (!reduces_) {
    return;
  }
  for (const auto& bucket : ddp::pack_buckets(gradients, {})) {
    int64_t bytes = 0;
    double full_at = 0;
    for (const size_t gradient : bucket) {
      bytes += gradients[gradient].bytes;
      full_at = std::max(full_at, made_at[gradient]);
    }
    account_.clock.send_at(
        full_at,
        account_.wire.count_sum(Operation::AllReduce, bytes, setup_.world()));
  }
  // Behind the buckets.
  account_.clock.wait_until(account_.clock.send(account_.wire.count(
      Operation::Agreement,
      times(kCountsBytes, setup_.world()),
      setup_.world())));
}

void ReplicatedRank::step() {
  account_.clock.wait_until(account_.clock.send(
      account_.wire.count(
          Operation::SendParams, sent_bytes_, setup_.world(), num_sends_),
      num_sends_));
  if (!has_state_) {
    has_state_ = true;
    account_.device.add(
        Kind::Optimizer,
        plus(
            times(owned_bytes_, states_of(setup_.optimizer)),
            counts_steps(setup_.optimizer) ? kStepBytes * num_owned_ : 0));
  }
  account_.device.touch(
      Kind::Optimizer,
      times(owned_bytes_, temporaries_of(setup_.optimizer, setup_.device)));
  for (Param& param : params_) {
    if (param.has_gradient) {
      account_.device.drop(Kind::Gradients, param.bytes);
    }
    param.has_gradient = false;
  }
}

} // namespace tessera::plan
