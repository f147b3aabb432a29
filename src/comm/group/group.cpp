#include <tessera/comm/agree.h>
#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/diagnostics/describe_call.h"
#include "comm/group/argument_checks.h"
#include "comm/group/group_impl.h"
#include "comm/group/staging.h"

namespace tessera {

using comm::Call;
using comm::Carrier;
using comm::GroupImpl;
using comm::ReducePlan;
using comm::StagedTensor;

Work::Work(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}

void Work::wait() {
  if (pending_) {
    // Dropped first: a second wait() after an error must not throw it again.
    std::exchange(pending_, nullptr)->wait();
  }
}

bool Work::done() const {
  return !pending_ || pending_->done();
}

Group::Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Group::Impl& Group::impl() const {
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
  const auto& carrier = impl().carrier(device);
  return carrier ? carrier->backend()->getBackendName() : "none";
}

std::chrono::milliseconds Group::timeout() const {
  return impl().world().timeout;
}

namespace {

using Contents = StagedTensor::Contents;
using Request = GroupImpl::Request;

Work start_all_gather(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& output,
    const at::Tensor& input) {
  comm::check_pair(group, request.operation, output, input);
  comm::check_parts(group, request.operation, output, "output", input, "input");
  if (group.size() == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) {
      output.detach().view({-1}).copy_(input.detach().view({-1}));
    }
    return {};
  }
  StagedTensor to(group, output, Contents::Bytes);
  StagedTensor from(group, input, Contents::Bytes);
  return group.launch(
      request,
      input,
      [out = to.wire(), in = from.wire()](
          Carrier& carrier, const Call& call, bool async) {
        return carrier.all_gather(call, out, in, async);
      },
      [to] { to.write_back(); });
}

Work start_reduce_scatter(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& output,
    const at::Tensor& input,
    ReduceOp op) {
  comm::check_pair(group, request.operation, output, input);
  comm::check_parts(group, request.operation, input, "input", output, "output");
  const ReducePlan plan =
      comm::plan_reduction(group, request.operation, input, op);
  if (group.size() == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) {
      output.detach().view({-1}).copy_(input.detach().view({-1}));
    }
    return {};
  }
  StagedTensor to(group, output, Contents::Values);
  StagedTensor from(group, input, Contents::Values);
  return group.launch(
      request,
      input,
      [out = to.wire(), in = from.wire(), op = plan.op](
          Carrier& carrier, const Call& call, bool async) {
        // Flat, since c10d wants matching outer dimensions.
        return carrier.reduce_scatter(
            call, out.view({-1}), in.view({-1}), op, async);
      },
      [to, divisor = plan.divisor] {
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
  comm::check_tensor(
      group, request.operation, "tensor", tensor, comm::RawAccess::Write);
  const ReducePlan plan =
      comm::plan_reduction(group, request.operation, tensor, op);
  if (group.size() == 1) {
    return {};
  }
  StagedTensor staged(group, tensor, Contents::Values);
  return group.launch(
      request,
      tensor,
      [wire = staged.wire(), op = plan.op](
          Carrier& carrier, const Call& call, bool async) {
        return carrier.all_reduce(call, wire, op, async);
      },
      [staged, divisor = plan.divisor] {
        if (divisor != 1) {
          staged.wire().div_(divisor);
        }
        staged.write_back();
      });
}

Work start_broadcast(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& tensor,
    int root) {
  comm::check_tensor(
      group, request.operation, "tensor", tensor, comm::RawAccess::Write);
  comm::check_root(group, request.operation, root);
  if (group.size() == 1) {
    return {};
  }
  StagedTensor staged(group, tensor, Contents::Bytes);
  return group.launch(
      request,
      tensor,
      [wire = staged.wire(), root](
          Carrier& carrier, const Call& call, bool async) {
        return carrier.broadcast(call, wire, root, async);
      },
      [staged] { staged.write_back(); });
}

Work start_barrier(GroupImpl& group, const Request& request) {
  if (group.size() == 1) {
    return {};
  }
  return group.launch(
      request,
      at::Tensor(),
      [](Carrier& carrier, const Call& call, bool async) {
        return carrier.barrier(call, async);
      },
      nullptr);
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

void Group::barrier(std::string_view label) const {
  start_barrier(impl(), {"barrier", label}).wait();
}

Work Group::barrier_async(std::string_view label) const {
  return start_barrier(impl(), {"barrier", label, {}, true});
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
  return Group(std::make_shared<Impl>(
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
  return Group(std::make_shared<Impl>(
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
  const auto& carrier = impl().carrier(c10::DeviceType::CPU);
  return carrier && carrier->can.shares_memory;
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
        fmt::format("[{}] is not a shape.", fmt::join(sizes, ", ")));
  }
  agree(
      *this,
      "allocate_shared",
      {fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", "))});
  return impl().carrier(c10::DeviceType::CPU)->allocate_shared(sizes, dtype);
}

} // namespace tessera
