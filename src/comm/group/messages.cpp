// Messages between two ranks of a group.
#include <tessera/comm/group.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <string>

#include "comm/diagnostics/describe_call.h"
#include "comm/group/argument_checks.h"
#include "comm/group/group_impl.h"
#include "comm/group/staging.h"
#include "comm/raw_access.h"
#include "libtorch/recording.h"

namespace tessera {

using comm::Call;
using comm::Carrier;
using comm::GroupImpl;
using comm::StagedTensor;

namespace {

/// NCCL compares neither sizes nor tags, so messages are the CPU's.
StagedTensor stage_message(const GroupImpl& group, const at::Tensor& tensor) {
  if (tensor.is_cuda()) {
    libtorch::refuse_in_recording("send or recv", comm::kOverNcclOnly);
  }
  return {
      group,
      tensor.is_cuda() ? tensor.detach().to(at::kCPU) : tensor,
      StagedTensor::Contents::Bytes};
}

std::string describe_route(
    const GroupImpl& group,
    const char* word,
    int peer,
    int tag) {
  return fmt::format(
      "{} rank {}, tag {}",
      word,
      group.global_ranks()[static_cast<size_t>(peer)],
      tag);
}

Work start_send(
    GroupImpl& group,
    const at::Tensor& tensor,
    int to,
    int tag,
    std::string_view label,
    bool async) {
  comm::check_peer(group, "send", to, tag);
  comm::check_tensor(group, "send", "tensor", tensor, comm::RawAccess::Read);
  StagedTensor staged = stage_message(group, tensor);
  return group.launch_message(
      comm::describe_message(
          "send", tensor, describe_route(group, "to", to, tag), label),
      async,
      [wire = staged.wire(), to, tag](
          Carrier& carrier, const Call& call, bool in_background) {
        return carrier.send(call, wire, to, tag, in_background);
      },
      nullptr);
}

Work start_recv(
    GroupImpl& group,
    const at::Tensor& tensor,
    int from,
    int tag,
    std::string_view label,
    bool async) {
  comm::check_peer(group, "recv", from, tag);
  comm::check_tensor(group, "recv", "tensor", tensor, comm::RawAccess::Write);
  StagedTensor staged = stage_message(group, tensor);
  return group.launch_message(
      comm::describe_message(
          "recv", tensor, describe_route(group, "from", from, tag), label),
      async,
      [wire = staged.wire(), from, tag](
          Carrier& carrier, const Call& call, bool in_background) {
        return carrier.recv(call, wire, from, tag, in_background);
      },
      [staged, tensor] {
        comm::before_raw_write(tensor, "recv"); // since it was called, too
        if (tensor.is_cuda()) {
          tensor.detach().view({-1}).copy_(
              staged.wire().view({-1}).view(tensor.scalar_type()));
        }
      });
}

} // namespace

void Group::send(
    const at::Tensor& tensor,
    int to,
    int tag,
    std::string_view label) const {
  start_send(impl(), tensor, to, tag, label, /*async=*/false).wait();
}

Work Group::send_async(
    const at::Tensor& tensor,
    int to,
    int tag,
    std::string_view label) const {
  return start_send(impl(), tensor, to, tag, label, /*async=*/true);
}

void Group::recv(
    const at::Tensor& tensor,
    int from,
    int tag,
    std::string_view label) const {
  start_recv(impl(), tensor, from, tag, label, /*async=*/false).wait();
}

Work Group::recv_async(
    const at::Tensor& tensor,
    int from,
    int tag,
    std::string_view label) const {
  return start_recv(impl(), tensor, from, tag, label, /*async=*/true);
}

} // namespace tessera
