#include <tessera/comm/agree.h>
#include <tessera/data/sampler.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "data/ranks.h"
#include "data/shares.h"

namespace tessera::data {
namespace {

constexpr const char* kCall = "DistributedSampler";

const char* name_of(EpochEnd end) {
  switch (end) {
    case EpochEnd::Drop:
      return "Drop";
    case EpochEnd::Pad:
      return "Pad";
    case EpochEnd::Uneven:
      return "Uneven";
    case EpochEnd::Continue:
      return "Continue";
  }
  return "unknown";
}

Division division_of(
    const Order& order,
    const SamplerOptions& options,
    int rank,
    int num_ranks) {
  return {
      .size = order.size(),
      .batch_size = options.batch_size(),
      .num_ranks = num_ranks,
      .rank = rank,
      .end = options.epoch_end()};
}

void check_options(
    const ErrorSite& site,
    const SamplerOptions& options,
    int64_t size,
    int num_ranks) {
  constexpr int64_t kMaxBatch = int64_t{1} << 40; // times ranks is no overflow
  if (options.batch_size() < 1 || options.batch_size() > kMaxBatch) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "batches of {} samples. Give 1 to 2^40.", options.batch_size()));
  }
  if (options.epoch_end() == EpochEnd::Drop &&
      size < options.batch_size() * num_ranks) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} samples do not fill one batch of {} on each of {} ranks, and EpochEnd::Drop leaves the samples out. Use smaller batches or EpochEnd::Pad.",
            size,
            options.batch_size(),
            num_ranks));
  }
}

/// A size that some ranks cannot have an order of is refused on all.
std::shared_ptr<const Order> order_together(
    int64_t size,
    const SamplerOptions& options) {
  std::shared_ptr<const Order> order;
  all_ranks_or_none(group_or_world(options.group()), kCall, [&] {
    order = default_order(size, options.seed(), options.shuffle());
  });
  return order;
}

void agree_on(
    const Group& group,
    std::string_view call,
    const Order& order,
    const SamplerOptions& options) {
  std::vector<std::string> items{
      fmt::format("batch_size {}", options.batch_size()),
      fmt::format("epoch_end {}", name_of(options.epoch_end()))};
  std::istringstream lines(order.identity().to_string());
  for (std::string line; std::getline(lines, line);) {
    items.push_back("order " + line);
  }
  agree(group, call, items);
}

Position position_in(const StateDict& state) {
  return {state.at("epoch").to_int(), state.at("samples").to_int()};
}

} // namespace

DistributedSampler::DistributedSampler(
    int64_t size,
    const SamplerOptions& options)
    : DistributedSampler(order_together(size, options), options) {}

DistributedSampler::DistributedSampler(
    std::shared_ptr<const Order> order,
    SamplerOptions options)
    : DistributedSampler(std::move(order), std::move(options), kCall) {}

DistributedSampler::DistributedSampler(
    std::shared_ptr<const Order> order,
    SamplerOptions options,
    std::string call)
    : call_(std::move(call)),
      order_(std::move(order)),
      options_(std::move(options)) {
  options_.group(group_or_world(options_.group()));
  if (const auto& group = options_.group()) {
    agree_on(*group, call_, *order_, options_);
    rank_ = group->rank();
    num_ranks_ = group->size();
  }
  check_options(site(), options_, size(), num_ranks_);
}

std::optional<Share> DistributedSampler::next() {
  if (end_is_due_) {
    end_is_due_ = false;
    return std::nullopt;
  }
  const auto division = division_of(*order_, options_, rank_, num_ranks_);
  const auto stretch = stretch_at(division, position_);
  if (!stretch) {
    position_ = {position_.epoch + 1, 0};
    return std::nullopt;
  }
  const bool continues = options_.epoch_end() == EpochEnd::Continue;
  Share share;
  share.num_fresh = continues
      ? stretch->rows
      : std::clamp<int64_t>(size() - stretch->first, 0, stretch->rows);
  for (int64_t row = 0; row < stretch->rows; ++row) {
    const int64_t place = stretch->first + row;
    const int64_t later = continues ? place / size() : 0;
    share.indices.push_back(
        order_->at(position_.epoch + later, place % size()));
  }
  end_is_due_ = leaves_ranks_without(division, position_.samples);
  position_ = end_is_due_ ? Position{position_.epoch + 1, 0} : stretch->next;
  return share;
}

ErrorSite DistributedSampler::site() const {
  return site_of(call_, options_.group());
}

void DistributedSampler::check_position(Position position) const {
  if (position.epoch < 0 || position.samples < 0 || position.samples > size()) {
    raise<c10::ValueError>(
        site(),
        fmt::format(
            "there is no position of {} samples in epoch {}: epochs count from 0 and have {} samples.",
            position.samples,
            position.epoch,
            size()));
  }
}

void DistributedSampler::seek(Position position) {
  check_position(position);
  position_ = position;
  end_is_due_ = false;
}

int64_t DistributedSampler::batches_per_epoch() const {
  return batches_left({0, 0});
}

int64_t DistributedSampler::batches_left(Position position) const {
  if (options_.epoch_end() == EpochEnd::Continue) {
    raise<c10::ValueError>(
        site(),
        "epochs do not end under EpochEnd::Continue, so their batches cannot be counted. Count samples: size() and position().");
  }
  return batches_from(
      division_of(*order_, options_, rank_, num_ranks_), position.samples);
}

StateDict DistributedSampler::state_dict() {
  return state_at(position_);
}

StateDict DistributedSampler::state_at(Position position) const {
  return {
      {"epoch", position.epoch},
      {"samples", position.samples},
      {"order", order_->identity()}};
}

void DistributedSampler::check_state_dict(const StateDict& state) const {
  const std::string differences =
      diff_state_dicts(state.at("order").dict(), order_->identity());
  if (!differences.empty()) {
    raise<c10::ValueError>(
        site(),
        "the position was saved for other data, or for data in another order, and means nothing here (first what was saved, then what is here):\n" +
            differences +
            "Pass the data set and the seed of the saved run, or leave this part out of what is loaded to begin anew.");
  }
  check_position(position_in(state));
}

void DistributedSampler::load_state_dict(const StateDict& state) {
  check_state_dict(state);
  position_ = position_in(state);
}

} // namespace tessera::data
