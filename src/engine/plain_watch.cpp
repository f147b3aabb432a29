#include "engine/plain_watch.h"

#include <tessera/error.h>

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

} // namespace

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

void PlainWatch::add_once(const std::string& name, uint64_t digest) {
  once_.insert_or_assign(name, digest);
}

std::map<std::string, uint64_t> PlainWatch::values() const {
  std::map<std::string, uint64_t> result = once_;
  for (const auto& [name, weak] : params_) {
    auto impl = weak.lock();
    if (!impl) {
      continue;
    }
    const at::Tensor param(std::move(impl));
    const bool is_nobodys = param.requires_grad() && !is_sharded(param) &&
        !is_ignored(param) && !is_averaged(param);
    if (is_nobodys) {
      result[name] = digest_of(param);
    }
  }
  return result;
}

int64_t PlainWatch::digest() const {
  if (params_.empty() && once_.empty()) {
    return 0;
  }
  const Bytes bytes = encode(values());
  return bytes.empty()
      ? 0
      : static_cast<int64_t>(
            (XXH3_64bits(bytes.data(), bytes.size()) | 4) & ~uint64_t{3});
}

void PlainWatch::compare(const Group& group) const {
  std::map<std::string, std::pair<uint64_t, int>> known; // value, whose
  int rank = 0;
  for (const Bytes& bytes :
       group.all_gather_bytes(encode(values()), "plain parameters")) {
    for (const auto& [name, value] : decode(bytes)) {
      const auto [first, is_new] = known.emplace(name, std::pair(value, rank));
      if (!is_new && first->second.first != value && once_.contains(name)) {
        raise<DisagreementError>(
            {.call = name, .rank = group.rank(), .world_size = group.size()},
            "rank " + std::to_string(rank) + " passed other values than rank " +
                std::to_string(first->second.second) +
                ", so the shards that the ranks made of them do not belong together. Pass the same full values on every rank.");
      }
      if (!is_new && first->second.first != value) {
        raise<DisagreementError>(
            {.call = "backward",
             .rank = group.rank(),
             .world_size = group.size(),
             .parameter = name},
            "it belongs to a model with sharded modules, is not sharded itself, and has other values on rank " +
                std::to_string(rank) + " than on rank " +
                std::to_string(first->second.second) +
                ": nobody averages its gradients. Call fully_shard on the whole model after its parts, or name the parameter in ignored_params and average its gradients yourself.");
      }
    }
    ++rank;
  }
}

} // namespace tessera::engine
