#include "engine/plain_watch.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/byte_vector.h"
#include "engine/plain_params.h"
#include "engine/start.h"
#include "engine/unit.h"

namespace tessera::engine {
namespace {

Bytes encode(const std::map<std::string, uint64_t>& values) {
  Bytes bytes;
  for (const auto& [name, value] : values) {
    const auto* number = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), number, number + sizeof value);
    bytes.insert(bytes.end(), name.begin(), name.end());
    bytes.push_back(0);
  }
  return bytes;
}

std::map<std::string, uint64_t> decode(const Bytes& bytes) {
  std::map<std::string, uint64_t> values;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    const std::string name(
        reinterpret_cast<const char*>(bytes.data() + at + sizeof value));
    values[name] = value;
    at += sizeof value + name.size() + 1;
  }
  return values;
}

/// Trainable, and its gradients are nobody's: neither a unit's, nor a
/// DistributedDataParallel's, nor the user's own.
bool is_nobodys(const at::Tensor& param) {
  return param.requires_grad() && !is_sharded(param) && !is_ignored(param) &&
      !is_averaged(param);
}

} // namespace

/// Of tensors that may be known by several names.
class PlainWatch::Digests {
 public:
  uint64_t of(const at::Tensor& param) {
    const auto [known, is_new] = known_.emplace(param.unsafeGetTensorImpl(), 0);
    if (is_new) {
      known->second = digest_of(param);
    }
    return known->second;
  }

 private:
  std::map<const c10::TensorImpl*, uint64_t> known_;
};

/// Parameters whose first values are the same.
struct PlainWatch::Alike {
  static constexpr const char* kMark = "~"; // names of C++ come before it

  std::string places; // on this rank
  std::vector<uint64_t> values; // digests, by parameter

  std::string name(uint64_t first) const {
    return fmt::format("{}{:016x} x{}", kMark, first, values.size());
  }
};

void PlainWatch::add(const std::string& name, const at::Tensor& param) {
  std::erase_if(
      params_, [](const auto& entry) { return entry.second.expired(); });
  const bool is_known =
      std::any_of(params_.begin(), params_.end(), [&param](const auto& entry) {
        return entry.second._unsafe_get_target() == param.unsafeGetTensorImpl();
      });
  if (is_known) {
    return;
  }
  std::string own = name;
  for (int number = 2; params_.contains(own); ++number) {
    own = name + " #" + std::to_string(number);
  }
  params_.emplace(own, WeakParam(param.getIntrusivePtr()));
}

void PlainWatch::add_stepped(
    const std::string& place,
    const at::Tensor& param,
    const std::weak_ptr<const void>& stepped_by) {
  std::erase_if(stepped_, [](const Stepped& one) {
    return one.param.expired() || one.by.expired();
  });
  const bool is_known =
      std::any_of(stepped_.begin(), stepped_.end(), [&](const Stepped& one) {
        return one.param._unsafe_get_target() == param.unsafeGetTensorImpl() &&
            one.by.lock() == stepped_by.lock();
      });
  if (!is_known) {
    stepped_.push_back(
        {place, WeakParam(param.getIntrusivePtr()), stepped_by, {}});
  }
}

void PlainWatch::add_once(const std::string& name, uint64_t digest) {
  once_.insert_or_assign(name, digest);
}

std::map<std::string, uint64_t> PlainWatch::values() {
  std::map<std::string, uint64_t> result = once_;
  Digests digests;
  for (const auto& [name, weak] : params_) {
    if (auto impl = weak.lock()) {
      const at::Tensor param(std::move(impl));
      if (is_nobodys(param)) {
        result[name] = digests.of(param);
      }
    }
  }
  for (auto& [first, alike] : stepped_alike(digests)) {
    std::sort(alike.values.begin(), alike.values.end()); // in any order
    result[alike.name(first)] = XXH3_64bits(
        alike.values.data(), alike.values.size() * sizeof(uint64_t));
  }
  return result;
}

std::map<uint64_t, PlainWatch::Alike> PlainWatch::stepped_alike(
    Digests& digests) {
  std::map<uint64_t, Alike> all;
  for (Stepped& one : stepped_) {
    auto impl = one.param.lock();
    if (!impl || one.by.expired()) {
      continue;
    }
    const at::Tensor param(std::move(impl));
    if (is_nobodys(param)) {
      const uint64_t digest = digests.of(param);
      one.first = one.first.value_or(digest);
      Alike& alike = all[*one.first];
      alike.values.push_back(digest);
      alike.places += (alike.places.empty() ? "" : " or ") + one.place;
    }
  }
  return all;
}

int64_t PlainWatch::digest() {
  if (params_.empty() && stepped_.empty() && once_.empty()) {
    return 0;
  }
  const Bytes bytes = encode(values());
  return bytes.empty()
      ? 0
      : static_cast<int64_t>(
            (XXH3_64bits(bytes.data(), bytes.size()) | 4) & ~uint64_t{3});
}

void PlainWatch::compare(const Group& group) {
  std::map<std::string, std::pair<uint64_t, int>> known; // value, whose
  int rank = 0;
  for (const Bytes& bytes :
       group.all_gather_bytes(encode(values()), "plain parameters")) {
    for (const auto& [name, value] : decode(bytes)) {
      const auto [first, is_new] = known.emplace(name, std::pair(value, rank));
      if (!is_new && first->second.first != value) {
        refuse(group, name, rank, first->second.second);
      }
    }
    ++rank;
  }
}

void PlainWatch::refuse(
    const Group& group,
    const std::string& name,
    int rank,
    int other) {
  ErrorSite where{
      .call = "backward", .rank = group.rank(), .world_size = group.size()};
  if (once_.contains(name)) {
    where.call = name;
    raise<DisagreementError>(
        where,
        fmt::format(
            "rank {} passed other values than rank {}, so the shards that the ranks made of them do not belong together. Pass the same full values on every rank.",
            rank,
            other));
  }
  const std::string values = fmt::format(
      "has other values on rank {} than on rank {}: nobody averages its gradients.",
      rank,
      other);
  if (name.starts_with(Alike::kMark)) {
    Digests digests;
    std::string places = "a parameter that other ranks step";
    for (const auto& [first, alike] : stepped_alike(digests)) {
      places = alike.name(first) == name ? alike.places : places;
    }
    raise<DisagreementError>(
        where,
        fmt::format(
            "{} is in an optimizer beside shards, is not sharded itself, began alike on all ranks, and {} Call fully_shard on the whole model after its parts, and give the optimizer tessera::parameters(model); or average its gradients yourself. If each rank is to train its own, give it an optimizer of its own.",
            places,
            values));
  }
  where.parameter = name;
  raise<DisagreementError>(
      where,
      fmt::format(
          "it belongs to a model with sharded modules, is not sharded itself, and {} Call fully_shard on the whole model after its parts, or name the parameter in ignored_params and average its gradients yourself.",
          values));
}

} // namespace tessera::engine
