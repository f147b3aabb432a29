#include "comm/describe.h"

#include <charconv>

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

void describe_tensor(
    char* field,
    size_t capacity,
    const at::Tensor& tensor,
    std::string_view suffix) {
  char* at = field;
  char* const end = field + capacity - 1;
  auto put = [&](std::string_view text) {
    at += text.copy(at, static_cast<size_t>(end - at));
  };
  put(c10::toString(tensor.scalar_type()));
  put(" [");
  bool first = true;
  for (int64_t size : tensor.sizes()) {
    put(first ? "" : ", ");
    first = false;
    char digits[24];
    const auto [stop, error] =
        std::to_chars(digits, digits + sizeof digits, size);
    put({digits, static_cast<size_t>(stop - digits)});
  }
  put("]");
  if (!suffix.empty()) {
    put(" ");
    put(suffix);
  }
  *at = '\0';
}

} // namespace tessera::comm
