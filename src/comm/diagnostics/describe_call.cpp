#include "comm/diagnostics/describe_call.h"

#include <charconv>

#include "base/fnv.h"

namespace tessera::comm {

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "SUM";
    case ReduceOp::Avg:
      return "AVG";
    case ReduceOp::Min:
      return "MIN";
    case ReduceOp::Max:
      return "MAX";
  }
  return "?";
}

Call describe_call(
    std::string_view operation,
    const at::Tensor& input,
    std::string_view suffix,
    std::string_view label) {
  Call call;
  assign(call.operation, operation);
  assign(call.label, label);
  uint64_t digest = mix_digest(mix_digest(0, operation), label);

  char* at = call.detail;
  char* const end = call.detail + sizeof call.detail - 1;
  auto put = [&](std::string_view text) {
    digest = mix_digest(digest, text);
    at += text.copy(at, static_cast<size_t>(end - at));
  };
  if (input.defined()) {
    call.bytes = input.nbytes();
    put(c10::toString(input.scalar_type()));
    put(" [");
    bool first = true;
    for (int64_t size : input.sizes()) {
      put(first ? "" : ", ");
      first = false;
      char digits[24];
      const auto result = std::to_chars(digits, digits + sizeof digits, size);
      put({digits, static_cast<size_t>(result.ptr - digits)});
    }
    put(suffix.empty() ? "]" : "] ");
  }
  put(suffix);
  *at = '\0';
  call.digest = digest;
  return call;
}

Call describe_message(
    std::string_view operation,
    const at::Tensor& tensor,
    std::string_view suffix,
    std::string_view label) {
  Call call = describe_call(operation, tensor, suffix, label);
  call.digest = mix_digest(
      mix_digest(0, std::string_view(c10::toString(tensor.scalar_type()))),
      label);
  return call;
}

} // namespace tessera::comm
