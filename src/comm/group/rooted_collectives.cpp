// Collectives of a group in which one rank, the root, gives or gets more than
// the others.
#include <tessera/comm/group.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <exception>
#include <functional>
#include <string>

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

namespace {

using Contents = StagedTensor::Contents;
using Request = GroupImpl::Request;

std::string suffix_of(int root) {
  return fmt::format("root {}", root);
}

Request rooted(
    const char* operation,
    std::string_view label,
    std::string_view suffix,
    bool async) {
  return {operation, label, suffix, async, /*always_compared=*/true};
}

/// Runs `check` of what only the root has. If it throws, the root says so where
/// the ranks compare their calls, so that every rank throws.
void check_on_root(
    GroupImpl& group,
    const Request& request,
    const at::Tensor& described,
    const std::function<void()>& check) {
  try {
    check();
  } catch (const c10::Error&) {
    const std::exception_ptr refusal = std::current_exception();
    Request refused = request;
    refused.suffix = "refused, see that rank's error";
    refused.async = false;
    if (group.size() > 1) {
      try {
        group
            .launch(
                refused,
                described,
                [](Carrier& carrier, const Call& call, bool async) {
                  return carrier.barrier(call, async);
                },
                nullptr)
            .wait();
      } catch (const DisagreementError&) {
        // That the others have made the call is what was to be expected.
      }
    }
    std::rethrow_exception(refusal);
  }
}

void copy_flat(const at::Tensor& to, const at::Tensor& from) {
  if (to.const_data_ptr() != from.const_data_ptr()) {
    to.detach().view({-1}).copy_(from.detach().view({-1}));
  }
}

Work start_gather(
    GroupImpl& group,
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label,
    bool async) {
  const std::string suffix = suffix_of(root);
  const Request request = rooted("gather", label, suffix, async);
  const char* name = request.operation;
  comm::check_root(group, name, root);
  comm::check_tensor(group, name, "input", input, comm::RawAccess::Read);
  const bool receives = group.rank() == root;
  if (receives) {
    check_on_root(group, request, input, [&] {
      comm::check_pair(group, name, output, input);
      comm::check_parts(group, name, output, "output", input, "input");
    });
  }
  if (group.size() == 1) {
    copy_flat(output, input);
    return {};
  }
  StagedTensor from(group, input, Contents::Bytes);
  StagedTensor to =
      receives ? StagedTensor(group, output, Contents::Bytes) : from;
  return group.launch(
      request,
      input,
      [out = receives ? to.wire() : at::Tensor(), in = from.wire(), root](
          Carrier& carrier, const Call& call, bool in_background) {
        return carrier.gather(call, out, in, root, in_background);
      },
      [to, receives] {
        if (receives) {
          to.write_back();
        }
      });
}

Work start_scatter(
    GroupImpl& group,
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label,
    bool async) {
  const std::string suffix = suffix_of(root);
  const Request request = rooted("scatter", label, suffix, async);
  const char* name = request.operation;
  comm::check_root(group, name, root);
  comm::check_tensor(group, name, "output", output, comm::RawAccess::Write);
  const bool sends = group.rank() == root;
  if (sends) {
    check_on_root(group, request, output, [&] {
      comm::check_pair(group, name, output, input);
      comm::check_parts(group, name, input, "input", output, "output");
    });
  }
  if (group.size() == 1) {
    copy_flat(output, input);
    return {};
  }
  StagedTensor to(group, output, Contents::Bytes);
  StagedTensor from = sends ? StagedTensor(group, input, Contents::Bytes) : to;
  return group.launch(
      request,
      output,
      [out = to.wire(), in = sends ? from.wire() : at::Tensor(), root](
          Carrier& carrier, const Call& call, bool in_background) {
        return carrier.scatter(call, out, in, root, in_background);
      },
      [to] { to.write_back(); });
}

Work start_reduce(
    GroupImpl& group,
    const at::Tensor& tensor,
    int root,
    ReduceOp op,
    std::string_view label,
    bool async) {
  const std::string suffix = fmt::format("{} root {}", comm::name_of(op), root);
  const Request request = rooted("reduce", label, suffix, async);
  comm::check_root(group, request.operation, root);
  // A write on every rank, though only the root's changes: the engine must see
  // the same on all of them.
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
      [wire = staged.wire(), root, op = plan.op](
          Carrier& carrier, const Call& call, bool in_background) {
        return carrier.reduce(call, wire, root, op, in_background);
      },
      [staged, divisor = plan.divisor, receives = group.rank() == root] {
        if (receives && divisor != 1) {
          staged.wire().div_(divisor);
        }
        if (receives) {
          staged.write_back();
        } else {
          staged.note_write();
        }
      });
}

} // namespace

void Group::gather(
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label) const {
  start_gather(impl(), output, input, root, label, /*async=*/false).wait();
}

Work Group::gather_async(
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label) const {
  return start_gather(impl(), output, input, root, label, /*async=*/true);
}

void Group::scatter(
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label) const {
  start_scatter(impl(), output, input, root, label, /*async=*/false).wait();
}

Work Group::scatter_async(
    const at::Tensor& output,
    const at::Tensor& input,
    int root,
    std::string_view label) const {
  return start_scatter(impl(), output, input, root, label, /*async=*/true);
}

void Group::reduce(
    const at::Tensor& tensor,
    int root,
    ReduceOp op,
    std::string_view label) const {
  start_reduce(impl(), tensor, root, op, label, /*async=*/false).wait();
}

Work Group::reduce_async(
    const at::Tensor& tensor,
    int root,
    ReduceOp op,
    std::string_view label) const {
  return start_reduce(impl(), tensor, root, op, label, /*async=*/true);
}

} // namespace tessera
