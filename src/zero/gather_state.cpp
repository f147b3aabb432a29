#include "zero/gather_state.h"

#include <tessera/engine/sharded_tensor.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::zero {
namespace {

constexpr const char* kStateLabel = "zero: optimizer state";
constexpr int64_t kBucketBytes = 32 << 20;
constexpr int64_t kLeastBytes = 1 << 20;
/// Smaller tensors (every "step") are sent with the names.
constexpr int64_t kSmallNumel = 64;

bool is_large(const StateValue& value) {
  return value.is_tensor() && value.tensor().numel() > kSmallNumel;
}

bool has_dims(const StateValue& value) {
  return value.is_tensor() && value.tensor().dim() > 0;
}

/// A tensor that is described with the names and is sent on its own, or not at
/// all.
struct Large {
  size_t leaf; // position among the leaves of the sender's entries
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
};

/// The entries of a rank: small values, and descriptions of its large tensors.
struct Manifest {
  FlatState entries; // None in place of the tensors below
  std::vector<Large> large;

  int64_t num_bytes() const {
    int64_t bytes = 0;
    for (const Large& tensor : large) {
      bytes += c10::multiply_integers(tensor.sizes) *
          static_cast<int64_t>(c10::elementSize(tensor.dtype));
    }
    return bytes;
  }
};

/// Describes the tensors for which `is_apart` is true, and moves them into
/// `tensors`.
Bytes write_manifest(
    const StateDict& own,
    bool (*is_apart)(const StateValue& value),
    std::vector<at::Tensor>& tensors) {
  FlatState entries = flatten_state_dict(own);
  StateList large;
  for (size_t i = 0; i < entries.leaves.size(); ++i) {
    StateValue& value = entries.leaves[i].value;
    if (is_apart(value)) {
      StateList sizes;
      for (const int64_t size : value.tensor().sizes()) {
        sizes.emplace_back(size);
      }
      large.emplace_back(StateList{
          i, static_cast<int>(value.tensor().scalar_type()), std::move(sizes)});
      tensors.push_back(value.tensor().detach());
      value = StateValue();
    }
  }
  return state_dict_to_bytes(
      {{"entries", unflatten_state_dict(entries)},
       {"large", std::move(large)}});
}

Manifest read_manifest(const Bytes& bytes) {
  const StateDict dict = state_dict_from_bytes(bytes);
  Manifest manifest{flatten_state_dict(dict.at("entries").dict()), {}};
  for (const StateValue& item : dict.at("large").list()) {
    const StateList& fields = item.list();
    Large large{
        static_cast<size_t>(fields[0].to_int()),
        static_cast<at::ScalarType>(fields[1].to_int()),
        {}};
    for (const StateValue& size : fields[2].list()) {
      large.sizes.push_back(size.to_int());
    }
    manifest.large.push_back(std::move(large));
  }
  return manifest;
}

/// Tensors as one sequence of bytes, read or written in ranges.
class ByteStream {
 public:
  explicit ByteStream(std::vector<at::Tensor> tensors)
      : tensors_(std::move(tensors)) {}

  /// The bytes from `begin` to `end` in host memory; for host tensors this is
  /// their own memory.
  std::vector<at::Tensor> range(int64_t begin, int64_t end) const {
    std::vector<at::Tensor> pieces;
    int64_t at = 0;
    for (const at::Tensor& tensor : tensors_) {
      const auto size = static_cast<int64_t>(tensor.nbytes());
      const int64_t from = std::max(begin, at) - at;
      const int64_t to = std::min(end, at + size) - at;
      if (from < to) {
        pieces.push_back(tensor.contiguous()
                             .view({-1})
                             .view(at::kByte)
                             .narrow(0, from, to - from)
                             .to(at::kCPU));
      }
      at += size;
    }
    return pieces;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

/// Receives the tensors of the other ranks into new tensors.
class Receiver {
 public:
  Receiver(std::vector<Manifest> manifests, int own_rank)
      : manifests_(std::move(manifests)) {
    for (size_t rank = 0; rank < manifests_.size(); ++rank) {
      std::vector<at::Tensor> tensors;
      if (static_cast<int>(rank) != own_rank) {
        for (const Large& large : manifests_[rank].large) {
          tensors.push_back(at::empty(large.sizes, at::dtype(large.dtype)));
          manifests_[rank].entries.leaves[large.leaf].value = tensors.back();
        }
      }
      streams_.emplace_back(std::move(tensors));
    }
  }

  std::vector<std::vector<at::Tensor>> range(int64_t begin, int64_t end) const {
    std::vector<std::vector<at::Tensor>> pieces;
    for (const ByteStream& stream : streams_) {
      pieces.push_back(stream.range(begin, end));
    }
    return pieces;
  }

  StateDict result(const StateDict& own, int own_rank) const {
    std::map<StateKey, StateValue> sorted;
    for (size_t rank = 0; rank < manifests_.size(); ++rank) {
      if (static_cast<int>(rank) != own_rank) {
        for (const auto& [key, value] :
             unflatten_state_dict(manifests_[rank].entries)) {
          sorted.emplace(key, value);
        }
      }
    }
    FlatState mine = flatten_state_dict(own);
    for (auto& leaf : mine.leaves) {
      if (leaf.value.is_tensor()) {
        const at::Tensor& tensor = leaf.value.tensor();
        leaf.value = tensor.detach().to(
            at::kCPU, tensor.scalar_type(), false, /*copy=*/true);
      }
    }
    for (const auto& [key, value] : unflatten_state_dict(mine)) {
      sorted.emplace(key, value);
    }
    StateDict result;
    for (auto& [key, value] : sorted) {
      result.set(key, std::move(value));
    }
    return result;
  }

 private:
  std::vector<Manifest> manifests_;
  std::vector<ByteStream> streams_;
};

} // namespace

StateDict gather_state(const Group& group, int to, const StateDict& own) {
  std::vector<at::Tensor> tensors;
  const Bytes manifest = write_manifest(own, is_large, tensors);
  std::vector<Manifest> manifests;
  int64_t longest = 0;
  for (const Bytes& bytes : group.all_gather_bytes(manifest, kStateLabel)) {
    manifests.push_back(read_manifest(bytes));
    if (static_cast<int>(manifests.size()) - 1 != to) {
      longest = std::max(longest, manifests.back().num_bytes());
    }
  }
  const bool receives = group.rank() == to;
  if (!receives) {
    manifests.assign(group.size(), {});
  }
  const Receiver receiver(std::move(manifests), group.rank());
  const ByteStream sender(
      receives ? std::vector<at::Tensor>() : std::move(tensors));
  const int64_t share =
      std::max(kLeastBytes, kBucketBytes / std::max(1, group.size() - 1));
  for (int64_t begin = 0; begin < longest; begin += share) {
    std::vector<std::vector<at::Tensor>> inputs(group.size());
    inputs[to] = sender.range(begin, begin + share);
    group.all_to_all(receiver.range(begin, begin + share), inputs, kStateLabel);
  }
  return receives ? receiver.result(own, group.rank()) : StateDict();
}

StateDict share_state(const Group& group, const StateDict& own) {
  std::vector<at::Tensor> tensors;
  const Bytes manifest = write_manifest(own, has_dims, tensors);
  std::map<StateKey, StateValue> sorted;
  int rank = 0;
  for (const Bytes& bytes : group.all_gather_bytes(manifest, kStateLabel)) {
    Manifest theirs = read_manifest(bytes);
    for (size_t i = 0; i < theirs.large.size(); ++i) {
      const Large& large = theirs.large[i];
      std::vector<ShardedTensor::Piece> pieces;
      if (rank == group.rank()) {
        pieces.push_back(
            {{std::vector<int64_t>(large.sizes.size(), 0), large.sizes},
             tensors[i]});
      }
      theirs.entries.leaves[large.leaf].value =
          ShardedTensor(large.sizes, large.dtype, std::move(pieces), group);
    }
    for (const auto& [key, value] : unflatten_state_dict(theirs.entries)) {
      sorted.emplace(key, value);
    }
    ++rank;
  }
  StateDict result;
  for (auto& [key, value] : sorted) {
    result.set(key, std::move(value));
  }
  return result;
}

} // namespace tessera::zero
