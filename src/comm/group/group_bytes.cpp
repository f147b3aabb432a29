// Collectives of byte strings, which may differ in length.
#include <tessera/comm/group.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/byte_vector.h"
#include "comm/group/argument_checks.h"
#include "comm/group/group_impl.h"
#include "libtorch/recording.h"

namespace tessera {
namespace {

at::Tensor to_tensor(std::span<const uint8_t> bytes) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return tensor;
}

Bytes to_bytes(const at::Tensor& tensor) {
  const auto* begin = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return Bytes(begin, begin + tensor.numel());
}

std::vector<int64_t> gather_sizes(
    const Group& group,
    size_t mine,
    std::string_view label) {
  at::Tensor all = at::empty({group.size()}, at::kLong);
  at::Tensor one = at::empty({1}, at::kLong);
  one.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(mine);
  group.all_gather_into(all, one, label);
  const int64_t* begin = all.const_data_ptr<int64_t>();
  return {begin, begin + group.size()};
}

/// Up to this size padding all texts to the longest is cheaper than one
/// broadcast per rank.
constexpr int64_t kPaddedGatherBytes = 1 << 20;

} // namespace

std::vector<Bytes> Group::all_gather_bytes(
    std::span<const uint8_t> bytes,
    std::string_view label) const {
  if (size() == 1) {
    return {Bytes(bytes.begin(), bytes.end())};
  }
  libtorch::refuse_in_recording(
      "all_gather_bytes", "Exchange bytes before or after the captured step.");
  const auto sizes = gather_sizes(*this, bytes.size(), label);
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<Bytes> result;
  if (longest * size() <= kPaddedGatherBytes) {
    at::Tensor all = at::empty({size(), longest}, at::kByte);
    at::Tensor mine = at::empty({longest}, at::kByte);
    if (!bytes.empty()) {
      std::memcpy(mine.mutable_data_ptr(), bytes.data(), bytes.size());
    }
    if (longest > 0) {
      all_gather_into(all, mine, label);
    }
    for (int peer = 0; peer < size(); ++peer) {
      result.push_back(
          to_bytes(all[peer].narrow(0, 0, sizes[static_cast<size_t>(peer)])));
    }
    return result;
  }
  for (int peer = 0; peer < size(); ++peer) {
    at::Tensor part = peer == rank()
        ? to_tensor(bytes)
        : at::empty({sizes[static_cast<size_t>(peer)]}, at::kByte);
    if (part.numel() > 0) {
      broadcast(part, peer, label);
    }
    result.push_back(to_bytes(part));
  }
  return result;
}

Bytes Group::broadcast_bytes(
    std::span<const uint8_t> bytes,
    int root,
    std::string_view label) const {
  comm::check_root(impl(), "broadcast_bytes", root);
  if (size() == 1) {
    return Bytes(bytes.begin(), bytes.end());
  }
  at::Tensor length = at::empty({1}, at::kLong);
  length.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(bytes.size());
  broadcast(length, root, label);
  at::Tensor data = rank() == root
      ? to_tensor(bytes)
      : at::empty({length.const_data_ptr<int64_t>()[0]}, at::kByte);
  if (data.numel() > 0) {
    broadcast(data, root, label);
  }
  return to_bytes(data);
}

std::vector<Bytes> Group::gather_bytes(
    std::span<const uint8_t> bytes,
    int root,
    std::string_view label) const {
  comm::check_root(impl(), "gather_bytes", root);
  if (size() == 1) {
    return {Bytes(bytes.begin(), bytes.end())};
  }
  const auto sizes = gather_sizes(*this, bytes.size(), label);
  const bool receives = rank() == root;
  const std::vector<int64_t> none(static_cast<size_t>(size()), 0);
  std::vector<int64_t> sends = none;
  sends[static_cast<size_t>(root)] = static_cast<int64_t>(bytes.size());
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  at::Tensor all = at::empty({receives ? total : 0}, at::kByte);
  all_to_all(all, to_tensor(bytes), receives ? sizes : none, sends, label);
  std::vector<Bytes> result;
  if (receives) {
    int64_t begin = 0;
    for (int64_t count : sizes) {
      result.push_back(to_bytes(all.narrow(0, begin, count)));
      begin += count;
    }
  }
  return result;
}

} // namespace tessera
