#include "comm/group/argument_checks.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "comm/shm/message.h"

namespace tessera::comm {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format(
      "{} [{}]",
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "));
}

const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

} // namespace

void check_tensor(
    const GroupImpl& group,
    const char* call,
    const char* name,
    const at::Tensor& tensor,
    RawAccess access) {
  const auto fail = [&](std::string_view what) {
    group.raise_error<c10::ValueError>(call, what);
  };
  if (!tensor.defined()) {
    fail(fmt::format("{} is an undefined tensor.", name));
  }
  if (access == RawAccess::Write) {
    before_raw_write(tensor, call);
  } else {
    before_raw_read(tensor, call);
  }
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    fail(fmt::format(
        "{} ({}) is not dense and contiguous. Pass {}.contiguous(), and copy the result back if it is an output.",
        name,
        shape_of(tensor),
        name));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    fail(fmt::format(
        "{} is a lazy conjugate or negative. Pass {}.resolve_conj().resolve_neg().",
        name,
        name));
  }
  if (tensor.device().type() != at::kCPU &&
      tensor.device().type() != at::kCUDA) {
    fail(fmt::format(
        "{} is on {}; tensors of the CPU and of CUDA devices can be sent.",
        name,
        tensor.device().str()));
  }
}

void check_pair(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& output,
    const at::Tensor& input) {
  check_tensor(group, call, "output", output, RawAccess::Write);
  check_tensor(group, call, "input", input, RawAccess::Read);
  if (output.scalar_type() != input.scalar_type() ||
      output.device() != input.device()) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "output is {} on {}, input is {} on {}; both must agree.",
            c10::toString(output.scalar_type()),
            output.device().str(),
            c10::toString(input.scalar_type()),
            input.device().str()));
  }
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return address_of(a) < address_of(b) + b.nbytes() &&
      address_of(b) < address_of(a) + a.nbytes();
}

void check_parts(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& whole,
    const char* whole_name,
    const at::Tensor& part,
    const char* part_name) {
  if (whole.numel() != part.numel() * group.size()) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} has {} elements and {} has {}; with {} ranks {} needs {}.",
            whole_name,
            whole.numel(),
            part_name,
            part.numel(),
            group.size(),
            whole_name,
            part.numel() * group.size()));
  }
  const bool in_place = address_of(part) ==
      address_of(whole) + static_cast<size_t>(group.rank()) * part.nbytes();
  if (overlap(whole, part) && !in_place) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} overlaps {} without being this rank's part of it. Give it memory of its own, or pass exactly that part.",
            part_name,
            whole_name));
  }
}

void check_root(const GroupImpl& group, const char* call, int root) {
  if (root < 0 || root >= group.size()) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "root is {}, but this group has ranks 0 to {}. Roots count within the group.",
            root,
            group.size() - 1));
  }
}

void check_peer(const GroupImpl& group, const char* call, int peer, int tag) {
  if (peer < 0 || peer >= group.size() || peer == group.rank()) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "the peer is rank {}, but this is rank {} of a group with ranks 0 to {}. A message goes to another rank of the group; peers count within the group.",
            peer,
            group.rank(),
            group.size() - 1));
  }
  if (tag < 0 || tag > shm::kLastTag) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "tag {} is not a number from 0 to {}.", tag, shm::kLastTag));
  }
}

std::vector<int64_t> bytes_of_splits(
    const GroupImpl& group,
    const char* call,
    const char* name,
    const at::Tensor& tensor,
    at::IntArrayRef splits) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  const bool fits = static_cast<int>(splits.size()) == group.size() &&
      sum == rows &&
      std::all_of(splits.begin(), splits.end(), [](int64_t split) {
                      return split >= 0;
                    });
  if (!fits) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} splits [{}] must be {} sizes that sum to the {} rows of the {}.",
            name,
            fmt::join(splits, ", "),
            group.size(),
            rows,
            name));
  }
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  std::vector<int64_t> scaled(splits.begin(), splits.end());
  for (int64_t& split : scaled) {
    split *= rows == 0 ? 0 : bytes / rows;
  }
  return scaled;
}

} // namespace tessera::comm
