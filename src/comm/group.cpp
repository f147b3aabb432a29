#include <tessera/comm/agree.h>
#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/describe.h"
#include "comm/group_impl.h"
#include "comm/shm/reduce_kernels.h"
#include "comm/shm_backend.h"

namespace tessera {

using comm::GroupImpl;

namespace {

using Request = GroupImpl::Request;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format(
      "{} [{}]",
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "));
}

void check_tensor(
    const GroupImpl& group,
    const char* call,
    const char* name,
    const at::Tensor& tensor) {
  const auto fail = [&](std::string_view what) {
    group.raise_error<c10::ValueError>(call, what);
  };
  if (!tensor.defined()) {
    fail(fmt::format("{} is an undefined tensor.", name));
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
  check_tensor(group, call, "output", output);
  check_tensor(group, call, "input", input);
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

const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return address_of(a) < address_of(b) + b.nbytes() &&
      address_of(b) < address_of(a) + a.nbytes();
}

/// `whole` must hold size() parts of `part`, and the two must not overlap
/// except where `part` is the rank()-th one.
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
            "{} overlaps {} without being this rank's part of it. Use memory of its own, or exactly that part.",
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

/// A tensor on its way to a backend that may not take it as it is.
///
/// wire() is what the backend gets: for data movement the bytes, for
/// reductions a dtype it can add, in host memory where the group has no
/// backend for the device. write_back() puts a result where it belongs.
class Parcel {
 public:
  enum class Contents { Bytes, Values };

  Parcel(const GroupImpl& group, const at::Tensor& tensor, Contents contents)
      : original_(tensor.detach()), wire_(original_) {
    const auto& backend = group.backend(tensor.device().type());
    staged_ = tensor.is_cuda() && backend == group.backend(at::kCPU);
    if (staged_) {
      wire_ = wire_.to(at::kCPU);
    }
    // Shared memory and the fake take every dtype.
    const bool takes_all = backend->getBackendName() == "shm" ||
        backend->getBackendName() == "fake";
    if (takes_all) {
      return;
    }
    if (contents == Contents::Bytes || wire_.scalar_type() == at::kBool) {
      wire_ = wire_.view({-1}).view(at::kByte);
    } else if (wire_.is_complex()) {
      wire_ = at::view_as_real(wire_);
    }
  }

  at::Tensor& wire() {
    return wire_;
  }

  void write_back() {
    if (staged_) {
      original_.view({-1}).copy_(as_original().view({-1}));
    }
  }

 private:
  at::Tensor as_original() const {
    if (wire_.scalar_type() == original_.scalar_type()) {
      return wire_;
    }
    return wire_.view({-1}).view(original_.scalar_type());
  }

  at::Tensor original_;
  at::Tensor wire_;
  bool staged_ = false;
};

using Contents = Parcel::Contents;

/// How a backend is asked for `op`, and what is left to do afterwards.
struct ReducePlan {
  c10d::ReduceOp op;
  double divisor = 1; // of the result; 1: nothing to do
};

ReducePlan plan_reduction(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& tensor,
    ReduceOp op) {
  const auto dtype = tensor.scalar_type();
  const bool averages = op == ReduceOp::Avg;
  if (averages && !at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "an average of {} is not defined. Convert to a floating type, or use ReduceOp::Sum.",
            c10::toString(dtype)));
  }
  if (at::isComplexType(dtype) &&
      (op == ReduceOp::Min || op == ReduceOp::Max)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} of complex numbers is not defined.", comm::name_of(op)));
  }
  const auto& backend = group.backend(tensor.device().type());
  const std::string name = backend ? backend->getBackendName() : "none";
  // Shared memory reduces the most; the others lack int16 of these.
  const bool is_wired = name == "gloo" || name == "nccl";
  if (!comm::shm::find_reduction(dtype, op) ||
      (is_wired && dtype == at::kShort)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} cannot be reduced{}. Convert the tensor, to int32 say.",
            c10::toString(dtype),
            is_wired ? " over " + name : ""));
  }
  switch (op) {
    case ReduceOp::Sum:
      // As bytes, true + true would be 2.
      return {
          dtype == at::kBool && name != "shm" ? c10d::ReduceOp::MAX
                                              : c10d::ReduceOp::SUM};
    case ReduceOp::Avg:
      // Gloo's AVG is a sum (pytorch issue 162338).
      return name == "gloo"
          ? ReducePlan{c10d::ReduceOp::SUM, static_cast<double>(group.size())}
          : ReducePlan{c10d::ReduceOp::AVG};
    case ReduceOp::Min:
      return {c10d::ReduceOp::MIN};
    case ReduceOp::Max:
      return {c10d::ReduceOp::MAX};
  }
  TESSERA_INTERNAL_ASSERT(false, "unknown reduction");
}

} // namespace

Work::Work(std::shared_ptr<comm::PendingCall> pending)
    : pending_(std::move(pending)) {}

void Work::wait() {
  if (pending_) {
    // Dropped first: a second wait() after an error must not throw it again.
    std::exchange(pending_, nullptr)->wait();
  }
}

bool Work::done() const {
  return !pending_ || pending_->done();
}

Group::Group(std::shared_ptr<GroupImpl> impl) : impl_(std::move(impl)) {}

GroupImpl& Group::impl() const {
  if (!impl_) {
    raise(
        {.call = "Group"},
        "this is an empty Group. Get one from tessera::init(), world(), split() or a Mesh.");
  }
  return *impl_;
}

int Group::rank() const {
  return impl().rank();
}

int Group::size() const {
  return impl().size();
}

const std::string& Group::name() const {
  return impl().name();
}

const std::vector<int>& Group::global_ranks() const {
  return impl().global_ranks();
}

std::string Group::backend(c10::DeviceType device) const {
  const auto& backend = impl().backend(device);
  return backend ? backend->getBackendName() : "none";
}

std::chrono::milliseconds Group::timeout() const {
  return impl().world().timeout;
}

namespace {

Work start_all_gather(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& output,
    const at::Tensor& input) {
  check_pair(group, request.operation, output, input);
  check_parts(group, request.operation, output, "output", input, "input");
  if (group.size() == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) {
      output.detach().view({-1}).copy_(input.detach().view({-1}));
    }
    return {};
  }
  Parcel to(group, output, Contents::Bytes);
  Parcel from(group, input, Contents::Bytes);
  return group.launch(
      request,
      input,
      [&](c10d::Backend& backend, bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        return backend._allgather_base(to.wire(), from.wire(), options);
      },
      [to]() mutable { to.write_back(); });
}

Work start_reduce_scatter(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& output,
    const at::Tensor& input,
    ReduceOp op) {
  check_pair(group, request.operation, output, input);
  check_parts(group, request.operation, input, "input", output, "output");
  const ReducePlan plan = plan_reduction(group, request.operation, input, op);
  if (group.size() == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) {
      output.detach().view({-1}).copy_(input.detach().view({-1}));
    }
    return {};
  }
  Parcel to(group, output, Contents::Values);
  Parcel from(group, input, Contents::Values);
  return group.launch(
      request,
      input,
      [&](c10d::Backend& backend, bool async) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = plan.op;
        options.asyncOp = async;
        // Flat, since c10d wants matching outer dimensions.
        at::Tensor flat_to = to.wire().view({-1});
        at::Tensor flat_from = from.wire().view({-1});
        return backend._reduce_scatter_base(flat_to, flat_from, options);
      },
      [to, divisor = plan.divisor]() mutable {
        if (divisor != 1) {
          to.wire().div_(divisor);
        }
        to.write_back();
      });
}

Work start_all_reduce(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& tensor,
    ReduceOp op) {
  check_tensor(group, request.operation, "tensor", tensor);
  const ReducePlan plan = plan_reduction(group, request.operation, tensor, op);
  if (group.size() == 1) {
    return {};
  }
  Parcel parcel(group, tensor, Contents::Values);
  return group.launch(
      request,
      tensor,
      [&](c10d::Backend& backend, bool async) {
        c10d::AllreduceOptions options;
        options.reduceOp = plan.op;
        options.asyncOp = async;
        std::vector<at::Tensor> tensors{parcel.wire()};
        return backend.allreduce(tensors, options);
      },
      [parcel, divisor = plan.divisor]() mutable {
        if (divisor != 1) {
          parcel.wire().div_(divisor);
        }
        parcel.write_back();
      });
}

Work start_broadcast(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& tensor,
    int root) {
  check_tensor(group, request.operation, "tensor", tensor);
  check_root(group, request.operation, root);
  if (group.size() == 1) {
    return {};
  }
  Parcel parcel(group, tensor, Contents::Bytes);
  return group.launch(
      request,
      tensor,
      [&](c10d::Backend& backend, bool async) {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        options.asyncOp = async;
        std::vector<at::Tensor> tensors{parcel.wire()};
        return backend.broadcast(tensors, options);
      },
      [parcel]() mutable { parcel.write_back(); });
}

/// Sizes on dim 0 in bytes.
std::vector<int64_t> bytes_of_splits(
    GroupImpl& group,
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

/// What rank i sends to rank j must be what j expects from i. Backends would
/// abort the process, or hand out memory that was never written.
void check_splits_match(
    GroupImpl& group,
    const char* call,
    const std::vector<int64_t>& receives,
    const std::vector<int64_t>& sends) {
  const int size = group.size();
  at::Tensor mine = at::empty({2, size}, at::kLong);
  at::Tensor all = at::empty({size, 2, size}, at::kLong);
  std::copy(sends.begin(), sends.end(), mine.mutable_data_ptr<int64_t>());
  std::copy(
      receives.begin(),
      receives.end(),
      mine.mutable_data_ptr<int64_t>() + size);
  Group(group.shared_from_this()).all_gather_into(all, mine, "splits");
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

Work start_all_to_all(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& output,
    const at::Tensor& input,
    at::IntArrayRef output_splits,
    at::IntArrayRef input_splits) {
  const char* call = request.operation;
  check_pair(group, call, output, input);
  const bool even = output_splits.empty() && input_splits.empty();
  if (even &&
      (output.numel() != input.numel() || input.numel() % group.size() != 0)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "output has {} elements and input {}; without splits both need the same number, divisible by {} ranks.",
            output.numel(),
            input.numel(),
            group.size()));
  }
  if (overlap(output, input)) {
    group.raise_error<c10::ValueError>(
        call, "output overlaps input. Use memory of its own.");
  }
  std::vector<int64_t> to_splits;
  std::vector<int64_t> from_splits;
  if (!even) {
    to_splits = bytes_of_splits(group, call, "output", output, output_splits);
    from_splits = bytes_of_splits(group, call, "input", input, input_splits);
    check_splits_match(group, call, to_splits, from_splits);
  }
  if (group.size() == 1) {
    output.detach().view({-1}).copy_(input.detach().view({-1}));
    return {};
  }
  Parcel to(group, output, Contents::Bytes);
  Parcel from(group, input, Contents::Bytes);
  at::Tensor flat_to = to.wire().view({-1}).view(at::kByte);
  at::Tensor flat_from = from.wire().view({-1}).view(at::kByte);
  // Inputs may differ in size from rank to rank: described without it.
  const at::Tensor& described = even ? input : flat_from.narrow(0, 0, 0);
  return group.launch(
      request,
      described,
      [&](c10d::Backend& backend, bool async) {
        c10d::AllToAllOptions options;
        options.asyncOp = async;
        return backend.alltoall_base(
            flat_to, flat_from, to_splits, from_splits, options);
      },
      [to, flat_from]() mutable { to.write_back(); });
}

} // namespace

void Group::all_gather_into(
    const at::Tensor& output,
    const at::Tensor& input,
    std::string_view label) const {
  start_all_gather(impl(), {"all_gather_into", label}, output, input).wait();
}

Work Group::all_gather_into_async(
    const at::Tensor& output,
    const at::Tensor& input,
    std::string_view label) const {
  return start_all_gather(
      impl(), {"all_gather_into", label, {}, true}, output, input);
}

void Group::reduce_scatter(
    const at::Tensor& output,
    const at::Tensor& input,
    ReduceOp op,
    std::string_view label) const {
  const Request request{"reduce_scatter", label, comm::name_of(op)};
  start_reduce_scatter(impl(), request, output, input, op).wait();
}

Work Group::reduce_scatter_async(
    const at::Tensor& output,
    const at::Tensor& input,
    ReduceOp op,
    std::string_view label) const {
  const Request request{"reduce_scatter", label, comm::name_of(op), true};
  return start_reduce_scatter(impl(), request, output, input, op);
}

void Group::all_reduce(
    const at::Tensor& tensor,
    ReduceOp op,
    std::string_view label) const {
  const Request request{"all_reduce", label, comm::name_of(op)};
  start_all_reduce(impl(), request, tensor, op).wait();
}

Work Group::all_reduce_async(
    const at::Tensor& tensor,
    ReduceOp op,
    std::string_view label) const {
  const Request request{"all_reduce", label, comm::name_of(op), true};
  return start_all_reduce(impl(), request, tensor, op);
}

void Group::broadcast(
    const at::Tensor& tensor,
    int root,
    std::string_view label) const {
  const std::string suffix = fmt::format("root {}", root);
  start_broadcast(impl(), {"broadcast", label, suffix}, tensor, root).wait();
}

Work Group::broadcast_async(
    const at::Tensor& tensor,
    int root,
    std::string_view label) const {
  const std::string suffix = fmt::format("root {}", root);
  return start_broadcast(
      impl(), {"broadcast", label, suffix, true}, tensor, root);
}

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

namespace {

using Pieces = std::vector<std::vector<at::Tensor>>;

/// Bytes for each rank; throws for pieces that cannot be sent.
std::vector<int64_t> bytes_of_pieces(
    GroupImpl& group,
    const char* name,
    const Pieces& pieces) {
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
      check_tensor(group, "all_to_all", name, tensor);
      result.back() += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return result;
}

at::Tensor flat_bytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

/// The first piece of all, which says where they are; none: on the host.
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

Work start_barrier(GroupImpl& group, const Request& request) {
  if (group.size() == 1) {
    return {};
  }
  return group.launch(
      request,
      at::Tensor(),
      [](c10d::Backend& backend, bool async) {
        c10d::BarrierOptions options;
        options.asyncOp = async;
        return backend.barrier(options);
      },
      nullptr);
}

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

/// Up to here padding all to the longest is cheaper than a round for each.
constexpr int64_t kPaddedGatherBytes = 1 << 20;

} // namespace

void Group::all_to_all(
    const std::vector<std::vector<at::Tensor>>& outputs,
    const std::vector<std::vector<at::Tensor>>& inputs,
    std::string_view label) const {
  GroupImpl& group = impl();
  const auto receives = bytes_of_pieces(group, "outputs", outputs);
  const auto sends = bytes_of_pieces(group, "inputs", inputs);
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
  const bool in_place = group.size() > 1 && device.is_cpu() &&
      group.backend(at::kCPU)->getBackendName() == "shm";
  if (in_place) {
    group
        .launch(
            {"all_to_all", label, "pieces"},
            at::Tensor(),
            [&](c10d::Backend& backend, bool) {
              return static_cast<comm::ShmBackend&>(backend).alltoall_pieces(
                  outputs, inputs);
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

void Group::barrier(std::string_view label) const {
  start_barrier(impl(), {"barrier", label}).wait();
}

Work Group::barrier_async(std::string_view label) const {
  return start_barrier(impl(), {"barrier", label, {}, true});
}

std::vector<Bytes> Group::all_gather_bytes(
    std::span<const uint8_t> bytes,
    std::string_view label) const {
  if (size() == 1) {
    return {Bytes(bytes.begin(), bytes.end())};
  }
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
  check_root(impl(), "broadcast_bytes", root);
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
  check_root(impl(), "gather_bytes", root);
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

std::optional<Group> Group::split(int color, int key, std::string_view name)
    const {
  GroupImpl& parent = impl();
  const int32_t mine[2] = {color, key};
  const auto* raw = reinterpret_cast<const uint8_t*>(mine);
  const auto all = all_gather_bytes({raw, sizeof mine}, "split");
  std::vector<std::pair<int, int>> members; // (key, rank)
  for (int peer = 0; peer < size(); ++peer) {
    int32_t theirs[2];
    std::memcpy(theirs, all[static_cast<size_t>(peer)].data(), sizeof theirs);
    if (theirs[0] == color) {
      members.emplace_back(theirs[1], peer);
    }
  }
  const int number = parent.next_split();
  if (color < 0) {
    return std::nullopt;
  }
  std::sort(members.begin(), members.end());
  std::vector<int> global;
  for (const auto& [their_key, peer] : members) {
    global.push_back(global_ranks()[static_cast<size_t>(peer)]);
  }
  const std::string place = fmt::format("split{}.{}", number, color);
  return Group(std::make_shared<GroupImpl>(
      parent.world_ptr(),
      c10::make_intrusive<c10d::PrefixStore>(place, parent.store()),
      fmt::format(
          "{}/{}", this->name(), name.empty() ? std::string_view(place) : name),
      std::move(global)));
}

Group Group::alone() const {
  if (size() == 1) {
    return *this;
  }
  GroupImpl& parent = impl();
  return Group(std::make_shared<GroupImpl>(
      parent.world_ptr(),
      c10::make_intrusive<c10d::PrefixStore>(
          fmt::format("alone.{}", rank()), parent.store()),
      fmt::format("{}/alone", name()),
      std::vector<int>{global_ranks()[static_cast<size_t>(rank())]}));
}

std::optional<Group> Group::subgroup(
    const std::vector<int>& ranks,
    std::string_view name) const {
  agree(*this, "subgroup", {fmt::format("ranks [{}]", fmt::join(ranks, ", "))});
  for (int member : ranks) {
    if (member < 0 || member >= size() ||
        std::count(ranks.begin(), ranks.end(), member) != 1) {
      impl().raise_error<c10::ValueError>(
          "subgroup",
          fmt::format(
              "[{}] must be different ranks of this group, 0 to {}.",
              fmt::join(ranks, ", "),
              size() - 1));
    }
  }
  const auto place = std::find(ranks.begin(), ranks.end(), rank());
  const bool takes_part = place != ranks.end();
  return split(
      takes_part ? 0 : -1, static_cast<int>(place - ranks.begin()), name);
}

bool Group::shares_memory() const {
  return backend(c10::DeviceType::CPU) == "shm";
}

at::Tensor Group::allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype)
    const {
  if (!shares_memory()) {
    impl().raise_error<c10::ValueError>(
        "allocate_shared",
        fmt::format(
            "the ranks of this group do not share memory (backend {}). Ask shares_memory() first.",
            backend(c10::DeviceType::CPU)));
  }
  const bool fits = std::all_of(sizes.begin(), sizes.end(), [](int64_t size) {
    return size >= 0 && size <= (int64_t{1} << 48);
  });
  if (!fits) {
    impl().raise_error<c10::ValueError>(
        "allocate_shared",
        fmt::format("[{}] is no shape.", fmt::join(sizes, ", ")));
  }
  agree(
      *this,
      "allocate_shared",
      {fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", "))});
  auto& shm =
      static_cast<comm::ShmBackend&>(*impl().backend(c10::DeviceType::CPU));
  return shm.allocate(sizes, dtype);
}

} // namespace tessera
