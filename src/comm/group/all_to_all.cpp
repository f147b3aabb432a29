#include <tessera/comm/group.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "comm/group/agreed_all_to_all.h"
#include "comm/group/argument_checks.h"
#include "comm/group/group_impl.h"
#include "comm/group/staging.h"
#include "libtorch/recording.h"

namespace tessera {

using comm::Call;
using comm::Carrier;
using comm::GroupImpl;
using comm::StagedTensor;

namespace {

/// What rank i sends to rank j must be what j expects from i. Backends would
/// abort the process, or hand out memory that was never written.
void check_splits_match(
    GroupImpl& group,
    const char* call,
    const std::vector<int64_t>& receives,
    const std::vector<int64_t>& sends) {
  libtorch::refuse_in_recording(
      call,
      "The ranks compare the sizes of their pieces on the host. Exchange one tensor in equal pieces, or make this call outside the captured step.");
  const int size = group.size();
  at::Tensor mine = at::empty({2, size}, at::kLong);
  at::Tensor all = at::empty({size, 2, size}, at::kLong);
  std::copy(sends.begin(), sends.end(), mine.mutable_data_ptr<int64_t>());
  std::copy(
      receives.begin(),
      receives.end(),
      mine.mutable_data_ptr<int64_t>() + size);
  // Every GroupImpl is a Group::Impl, see group_impl.h.
  const Group handle(
      std::static_pointer_cast<Group::Impl>(group.shared_from_this()));
  handle.all_gather_into(all, mine, "splits");
  const auto table = all.accessor<int64_t, 3>();
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      if (table[from][0][to] != table[to][1][from]) {
        group.raise_error<DisagreementError>(
            call,
            fmt::format(
                "rank {} sends {} bytes to rank {}, which expects {}. The input splits of the one must be the output splits of the other.",
                group.global_ranks()[static_cast<size_t>(from)],
                table[from][0][to],
                group.global_ranks()[static_cast<size_t>(to)],
                table[to][1][from]));
      }
    }
  }
}

enum class Splits { Compared, Agreed };

Work start_all_to_all(
    GroupImpl& group,
    const GroupImpl::Request& request,
    const at::Tensor& output,
    const at::Tensor& input,
    at::IntArrayRef output_splits,
    at::IntArrayRef input_splits,
    Splits splits = Splits::Compared) {
  const char* name = request.operation;
  comm::check_pair(group, name, output, input);
  const bool even = output_splits.empty() && input_splits.empty();
  if (even &&
      (output.numel() != input.numel() || input.numel() % group.size() != 0)) {
    group.raise_error<c10::ValueError>(
        name,
        fmt::format(
            "output has {} elements and input {}; without splits both need the same number, divisible by {} ranks.",
            output.numel(),
            input.numel(),
            group.size()));
  }
  if (comm::overlap(output, input)) {
    group.raise_error<c10::ValueError>(
        name, "output overlaps input. Give the output memory of its own.");
  }
  std::vector<int64_t> to_splits;
  std::vector<int64_t> from_splits;
  if (!even) {
    to_splits =
        comm::bytes_of_splits(group, name, "output", output, output_splits);
    from_splits =
        comm::bytes_of_splits(group, name, "input", input, input_splits);
    if (splits == Splits::Compared) {
      check_splits_match(group, name, to_splits, from_splits);
    }
  }
  if (group.size() == 1) {
    output.detach().view({-1}).copy_(input.detach().view({-1}));
    return {};
  }
  StagedTensor to(group, output, StagedTensor::Contents::Bytes);
  StagedTensor from(group, input, StagedTensor::Contents::Bytes);
  at::Tensor flat_to = to.wire().view({-1}).view(at::kByte);
  at::Tensor flat_from = from.wire().view({-1}).view(at::kByte);
  // Uneven inputs differ in size from rank to rank, so calls do not compare it.
  const at::Tensor& described = even ? input : flat_from.narrow(0, 0, 0);
  return group.launch(
      request,
      described,
      [flat_to,
       flat_from,
       to_splits = std::move(to_splits),
       from_splits = std::move(from_splits)](
          Carrier& carrier, const Call& call, bool async) {
        return carrier.all_to_all(
            call, flat_to, flat_from, to_splits, from_splits, async);
      },
      [to, flat_from] { to.write_back(); });
}

using Pieces = std::vector<std::vector<at::Tensor>>;

/// Bytes for each rank; throws for pieces that cannot be sent.
std::vector<int64_t> bytes_of_pieces(
    GroupImpl& group,
    const char* name,
    const Pieces& pieces,
    comm::RawAccess access) {
  if (pieces.size() != static_cast<size_t>(group.size())) {
    group.raise_error<c10::ValueError>(
        "all_to_all",
        fmt::format(
            "{} has pieces for {} ranks, expected {}.",
            name,
            pieces.size(),
            group.size()));
  }
  std::vector<int64_t> result;
  for (const auto& tensors : pieces) {
    result.push_back(0);
    for (const at::Tensor& tensor : tensors) {
      comm::check_tensor(group, "all_to_all", name, tensor, access);
      result.back() += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return result;
}

at::Tensor flat_bytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

/// The device of the first piece; the CPU if there are no pieces.
at::Device device_of(const Pieces& inputs, const Pieces& outputs) {
  for (const Pieces* pieces : {&inputs, &outputs}) {
    for (const auto& tensors : *pieces) {
      if (!tensors.empty()) {
        return tensors.front().device();
      }
    }
  }
  return at::kCPU;
}

} // namespace

void Group::all_to_all(
    const at::Tensor& output,
    const at::Tensor& input,
    std::string_view label) const {
  start_all_to_all(impl(), {"all_to_all", label}, output, input, {}, {}).wait();
}

Work Group::all_to_all_async(
    const at::Tensor& output,
    const at::Tensor& input,
    std::string_view label) const {
  return start_all_to_all(
      impl(), {"all_to_all", label, {}, true}, output, input, {}, {});
}

void Group::all_to_all(
    const at::Tensor& output,
    const at::Tensor& input,
    at::IntArrayRef output_splits,
    at::IntArrayRef input_splits,
    std::string_view label) const {
  start_all_to_all(
      impl(),
      {"all_to_all", label, "uneven"},
      output,
      input,
      output_splits,
      input_splits)
      .wait();
}

Work comm::start_agreed_all_to_all(
    const Group& group,
    const at::Tensor& output,
    const at::Tensor& input,
    at::IntArrayRef output_splits,
    at::IntArrayRef input_splits,
    std::string_view label) {
  return start_all_to_all(
      group.impl(),
      {"all_to_all", label, "uneven", true},
      output,
      input,
      output_splits,
      input_splits,
      Splits::Agreed);
}

void Group::all_to_all(
    const std::vector<std::vector<at::Tensor>>& outputs,
    const std::vector<std::vector<at::Tensor>>& inputs,
    std::string_view label) const {
  GroupImpl& group = impl();
  const auto sends = // first: what is read is gathered before it is written to
      bytes_of_pieces(group, "inputs", inputs, comm::RawAccess::Read);
  const auto receives =
      bytes_of_pieces(group, "outputs", outputs, comm::RawAccess::Write);
  check_splits_match(group, "all_to_all", receives, sends);
  const at::Device device = device_of(inputs, outputs);
  for (const Pieces* pieces : {&inputs, &outputs}) {
    for (const auto& tensors : *pieces) {
      for (const at::Tensor& tensor : tensors) {
        if (tensor.device() != device) {
          group.raise_error<c10::ValueError>(
              "all_to_all",
              fmt::format(
                  "pieces are on {} and on {}; all must be on one device.",
                  device.str(),
                  tensor.device().str()));
        }
      }
    }
  }
  if (device.is_cpu() && shares_memory()) { // without packing
    group
        .launch(
            {"all_to_all", label, "pieces"},
            at::Tensor(),
            [&](Carrier& carrier, const Call& call, bool) {
              return carrier.all_to_all_pieces(call, outputs, inputs);
            },
            nullptr)
        .wait();
    return;
  }
  std::vector<at::Tensor> parts;
  for (const auto& tensors : inputs) {
    for (const at::Tensor& tensor : tensors) {
      parts.push_back(flat_bytes(tensor));
    }
  }
  const auto options = at::TensorOptions(device).dtype(at::kByte);
  const at::Tensor packed =
      parts.empty() ? at::empty({0}, options) : at::cat(parts);
  const at::Tensor received = at::empty(
      {std::accumulate(receives.begin(), receives.end(), int64_t{0})}, options);
  all_to_all(received, packed, receives, sends, label);
  int64_t begin = 0;
  for (const auto& tensors : outputs) {
    for (const at::Tensor& tensor : tensors) {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      flat_bytes(tensor).copy_(received.narrow(0, begin, bytes));
      begin += bytes;
    }
  }
}

} // namespace tessera
