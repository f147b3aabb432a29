#include <tessera/comm/agree.h>
#include <tessera/engine/sharded_tensor.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/byte_vector.h"
#include "comm/raw_access.h"
#include "engine/boxes.h"

namespace tessera {
namespace {

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::string describe(const ShardedTensor::Box& box) {
  return fmt::format(
      "box at [{}] of sizes [{}]",
      fmt::join(box.offsets, ", "),
      fmt::join(box.sizes, ", "));
}

bool is_inside(
    const ShardedTensor::Box& box,
    const std::vector<int64_t>& sizes) {
  if (box.offsets.size() != sizes.size() || box.sizes.size() != sizes.size()) {
    return false;
  }
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (box.offsets[dim] < 0 || box.sizes[dim] < 0 ||
        box.offsets[dim] > sizes[dim] - box.sizes[dim]) {
      return false;
    }
  }
  return true;
}

bool overlap(const ShardedTensor::Box& a, const ShardedTensor::Box& b) {
  if (a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    if (a.offsets[dim] >= b.offsets[dim] + b.sizes[dim] ||
        b.offsets[dim] >= a.offsets[dim] + a.sizes[dim]) {
      return false;
    }
  }
  return true;
}

/// The offsets and sizes of each box, one after another.
Bytes to_bytes(const std::vector<ShardedTensor::Piece>& pieces) {
  std::vector<int64_t> numbers;
  for (const auto& piece : pieces) {
    numbers.insert(
        numbers.end(), piece.box.offsets.begin(), piece.box.offsets.end());
    numbers.insert(
        numbers.end(), piece.box.sizes.begin(), piece.box.sizes.end());
  }
  // The device of the pieces, for ranks that have none.
  numbers.push_back(
      pieces.empty()
          ? -1
          : static_cast<int64_t>(pieces.front().tensor.device().type()));
  // A tensor of no dims has boxes without numbers: count them.
  numbers.push_back(static_cast<int64_t>(pieces.size()));
  Bytes bytes(numbers.size() * sizeof(int64_t));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

std::vector<ShardedTensor::Box> from_bytes(
    const Bytes& bytes,
    size_t ndim,
    int64_t& device_type) {
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  device_type = std::max(device_type, *(numbers.end() - 2));
  const auto count = static_cast<size_t>(numbers.back());
  std::vector<ShardedTensor::Box> boxes(count);
  const int64_t* next = numbers.data();
  for (ShardedTensor::Box& box : boxes) {
    box.offsets.assign(next, next + ndim);
    box.sizes.assign(next + ndim, next + 2 * ndim);
    next += 2 * ndim;
  }
  return boxes;
}

/// Why the boxes of all ranks do not cover each element of the tensor exactly
/// once.
std::optional<std::string> objection_to(
    const std::vector<std::vector<ShardedTensor::Box>>& by_rank,
    const std::vector<int64_t>& sizes) {
  int64_t covered = 0;
  std::vector<const ShardedTensor::Box*> all;
  for (const auto& boxes : by_rank) {
    for (const ShardedTensor::Box& box : boxes) {
      if (!is_inside(box, sizes)) {
        return describe(box) + " is not inside it.";
      }
      for (const ShardedTensor::Box* other : all) {
        if (overlap(box, *other)) {
          return fmt::format(
              "{} and {} overlap.", describe(box), describe(*other));
        }
      }
      all.push_back(&box);
      covered += box.numel();
    }
  }
  if (covered != product(sizes)) {
    return fmt::format(
        "the ranks have {} of its {} elements.", covered, product(sizes));
  }
  return std::nullopt;
}

} // namespace

ShardedTensor::ShardedTensor(
    std::vector<int64_t> sizes,
    at::ScalarType dtype,
    std::vector<Piece> pieces,
    Group group,
    at::Tensor local)
    : sizes_(std::move(sizes)),
      dtype_(dtype),
      pieces_(std::move(pieces)),
      group_(std::move(group)),
      local_(std::move(local)) {
  for (const Piece& piece : pieces_) {
    if (!is_inside(piece.box, sizes_)) {
      raise<c10::ValueError>(
          {.call = "ShardedTensor"},
          fmt::format(
              "{} is not inside a tensor of sizes [{}].",
              describe(piece.box),
              fmt::join(sizes_, ", ")));
    }
    if (piece.tensor.sizes() != at::IntArrayRef(piece.box.sizes) ||
        piece.tensor.scalar_type() != dtype_) {
      raise<c10::ValueError>(
          {.call = "ShardedTensor"},
          fmt::format(
              "a piece has {} [{}]; expected {} as its {}.",
              c10::toString(piece.tensor.scalar_type()),
              fmt::join(piece.tensor.sizes(), ", "),
              c10::toString(dtype_),
              describe(piece.box)));
    }
  }
}

int64_t ShardedTensor::numel() const {
  return product(sizes_);
}

int64_t ShardedTensor::local_numel() const {
  int64_t numel = 0;
  for (const Piece& piece : pieces_) {
    numel += piece.box.numel();
  }
  return numel;
}

void ShardedTensor::before_raw_write(const char* call) const {
  if (local_.defined()) {
    comm::before_raw_write(local_, call);
  }
  for (const Piece& piece : pieces_) {
    comm::before_raw_write(piece.tensor, call);
  }
}

at::Tensor ShardedTensor::full_tensor() const {
  std::vector<std::vector<ShardedTensor::Box>> by_rank;
  int64_t largest = 0;
  int64_t device_type = 0;
  for (const Bytes& bytes :
       group_.all_gather_bytes(to_bytes(pieces_), "boxes")) {
    by_rank.push_back(from_bytes(bytes, sizes_.size(), device_type));
    int64_t numel = 0;
    for (const ShardedTensor::Box& box : by_rank.back()) {
      numel += box.numel();
    }
    largest = std::max(largest, numel);
  }
  fail_together(group_, "full_tensor", objection_to(by_rank, sizes_));

  // All ranks must use the same backend.
  const auto type = static_cast<c10::DeviceType>(device_type);
  const at::Device device = !pieces_.empty() ? pieces_.front().tensor.device()
      : type == at::kCPU                     ? at::Device(at::kCPU)
                         : c10::impl::VirtualGuardImpl(type).getDevice();
  const auto options = at::TensorOptions(device).dtype(dtype_);
  const at::Tensor mine = at::empty({largest}, options);
  int64_t end = 0;
  for (const Piece& piece : pieces_) {
    const int64_t numel = piece.box.numel();
    mine.narrow(0, end, numel).copy_(piece.tensor.detach().reshape({-1}));
    end += numel;
  }
  const at::Tensor all = at::empty({group_.size(), largest}, options);
  group_.all_gather_into(all, mine, "full_tensor");
  at::Tensor whole = at::empty(sizes_, options);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    int64_t begin = 0;
    for (const ShardedTensor::Box& box : by_rank[rank]) {
      const int64_t numel = box.numel();
      engine::view_of(whole, box)
          .copy_(all[static_cast<int64_t>(rank)]
                     .narrow(0, begin, numel)
                     .view(box.sizes));
      begin += numel;
    }
  }
  return whole;
}

} // namespace tessera
