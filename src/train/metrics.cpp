#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/state/state_dict.h>
#include <tessera/train/metrics.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "libtorch/recording.h"

namespace tessera {
namespace {

enum class MetricKind : int64_t { Mean, Sum, Min, Max };

const char* kind_name(MetricKind kind) {
  switch (kind) {
    case MetricKind::Mean:
      return "mean";
    case MetricKind::Sum:
      return "sum";
    case MetricKind::Min:
      return "min";
    case MetricKind::Max:
      return "max";
  }
  TESSERA_INTERNAL_ASSERT(false, "no such kind of metric");
}

/// A value and its weight, on the host.
struct Partial {
  MetricKind kind = MetricKind::Sum;
  double value = 0; // of a mean: weighted
  double weight = 0; // of a mean
};

double nothing_of(MetricKind kind) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return kind == MetricKind::Min ? kInfinity
      : kind == MetricKind::Max  ? -kInfinity
                                 : 0;
}

double combine(MetricKind kind, double a, double b) {
  if (kind == MetricKind::Mean || kind == MetricKind::Sum) {
    return a + b;
  }
  if (std::isnan(a) || std::isnan(b)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return kind == MetricKind::Min ? std::min(a, b) : std::max(a, b);
}

at::Tensor combine(MetricKind kind, const at::Tensor& a, const at::Tensor& b) {
  return kind == MetricKind::Min ? at::minimum(a, b)
      : kind == MetricKind::Max  ? at::maximum(a, b)
                                 : a + b;
}

/// What this rank has of a metric: numbers on the host, tensors where they are.
struct Metric {
  Partial host;
  std::vector<at::Tensor> on_devices; // double scalars, at most one per device

  void add(const at::Tensor& value) {
    for (at::Tensor& sum : on_devices) {
      if (sum.device() == value.device()) {
        sum = combine(host.kind, sum, value);
        return;
      }
    }
    on_devices.push_back(value);
  }
};

constexpr const char* kReduce = "Metrics::reduce";

} // namespace

struct Metrics::Impl {
  Group group; // no group: the world, if there is one
  std::map<std::string, Metric> metrics;
  std::optional<std::string> mistake; // the first

  void add(
      const std::string& name,
      MetricKind kind,
      const Value& value,
      double weight);
  StateDict take_partials();
};

void Metrics::Impl::add(
    const std::string& name,
    MetricKind kind,
    const Value& value,
    double weight) {
  libtorch::refuse_in_recording(
      "Metrics", "Add what the captured step returns, after the step.");
  const auto note = [&](const std::string& what) {
    mistake = mistake.value_or(fmt::format("metric \"{}\": {}", name, what));
  };
  const auto [entry, is_new] = metrics.try_emplace(name);
  Metric& metric = entry->second;
  if (is_new) {
    metric.host = {.kind = kind, .value = nothing_of(kind)};
  }
  if (metric.host.kind != kind) {
    note(fmt::format(
        "it is a {} and a {}. Give each its own name.",
        kind_name(metric.host.kind),
        kind_name(kind)));
    return;
  }
  if (!(weight >= 0) || std::isinf(weight)) {
    note(fmt::format("its count is {}; expected 0 or more.", weight));
    return;
  }
  if (weight == 0) {
    return;
  }
  if (value.is_tensor_ && !value.tensor_.defined()) {
    note(
        "a tensor that is not defined. Leave the call out where there is none.");
    return;
  }
  metric.host.weight += weight;
  const double factor = kind == MetricKind::Mean ? weight : 1;
  if (!value.is_tensor_) {
    metric.host.value =
        combine(kind, metric.host.value, value.number_ * factor);
    return;
  }
  if (value.tensor_.numel() != 1) {
    note(fmt::format(
        "a tensor of {} elements. Pass its sum() or mean().",
        value.tensor_.numel()));
    return;
  }
  const at::NoGradGuard no_grad;
  metric.add(value.tensor_.detach().reshape({}).to(at::kDouble) * factor);
}

/// What this rank has, by name, and no more afterwards. One copy from each
/// device.
StateDict Metrics::Impl::take_partials() {
  const auto taken = std::exchange(metrics, {});
  std::map<std::string, Partial> partials;
  std::map<std::string, std::vector<std::pair<std::string, at::Tensor>>>
      by_device;
  for (const auto& [name, metric] : taken) {
    partials[name] = metric.host;
    for (const at::Tensor& value : metric.on_devices) {
      by_device[value.device().str()].emplace_back(name, value);
    }
  }
  for (const auto& [device, named] : by_device) {
    std::vector<at::Tensor> values;
    for (const auto& [name, value] : named) {
      values.push_back(value);
    }
    const at::Tensor host = at::stack(values).to(at::kCPU);
    for (size_t i = 0; i < named.size(); ++i) {
      Partial& partial = partials.at(named[i].first);
      partial.value = combine(
          partial.kind, partial.value, host.const_data_ptr<double>()[i]);
    }
  }
  StateDict dict;
  for (const auto& [name, partial] : partials) {
    dict.set(
        name,
        StateList{
            static_cast<int64_t>(partial.kind), partial.value, partial.weight});
  }
  return dict;
}

Metrics::Metrics(const Group& group) : impl_(std::make_unique<Impl>()) {
  impl_->group = group;
}

Metrics::~Metrics() = default;
Metrics::Metrics(Metrics&&) noexcept = default;
Metrics& Metrics::operator=(Metrics&&) noexcept = default;

void Metrics::mean(const std::string& name, const Value& value, double count) {
  impl_->add(name, MetricKind::Mean, value, count);
}

void Metrics::sum(const std::string& name, const Value& value) {
  impl_->add(name, MetricKind::Sum, value, 1);
}

void Metrics::count(const std::string& name, int64_t number) {
  impl_->add(name, MetricKind::Sum, static_cast<double>(number), 1);
}

void Metrics::min(const std::string& name, const Value& value) {
  impl_->add(name, MetricKind::Min, value, 1);
}

void Metrics::max(const std::string& name, const Value& value) {
  impl_->add(name, MetricKind::Max, value, 1);
}

void Metrics::clear() {
  impl_->metrics.clear();
  impl_->mistake.reset();
}

std::map<std::string, double> Metrics::reduce() {
  Group group = impl_->group;
  if (!group.valid() && is_initialized()) {
    group = world();
  }
  StateDict mine{{"metrics", impl_->take_partials()}};
  if (const auto mistake = std::exchange(impl_->mistake, std::nullopt)) {
    mine.set("mistake", *mistake);
  }
  const auto bytes = state_dict_to_bytes(mine);
  const auto all = group.valid() ? group.all_gather_bytes(bytes, "metrics")
                                 : std::vector<std::vector<uint8_t>>{bytes};
  std::map<std::string, std::pair<Partial, size_t>> totals; // and whose
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const StateDict theirs = state_dict_from_bytes(all[rank]);
    if (const StateValue* mistake = theirs.find("mistake")) {
      raise<c10::ValueError>(
          {.call = kReduce},
          fmt::format("rank {}, {}", rank, mistake->string()));
    }
    for (const auto& [key, value] : theirs.at("metrics").dict()) {
      const Partial partial{
          .kind = static_cast<MetricKind>(value.list().at(0).to_int()),
          .value = value.list().at(1).to_double(),
          .weight = value.list().at(2).to_double()};
      const auto [entry, is_new] =
          totals.try_emplace(key.name(), partial, rank);
      auto& [total, first] = entry->second;
      if (total.kind != partial.kind) {
        raise<c10::ValueError>(
            {.call = kReduce},
            fmt::format(
                "metric \"{}\": it is a {} on rank {} and a {} on rank {}. Give each its own name.",
                key.name(),
                kind_name(total.kind),
                first,
                kind_name(partial.kind),
                rank));
      }
      if (!is_new) {
        total.value = combine(total.kind, total.value, partial.value);
        total.weight += partial.weight;
      }
    }
  }
  std::map<std::string, double> result;
  for (const auto& [name, entry] : totals) {
    const Partial& total = entry.first;
    result[name] = total.kind == MetricKind::Mean ? total.value / total.weight
                                                  : total.value;
  }
  return result;
}

} // namespace tessera
