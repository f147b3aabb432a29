#include "exported/operator_name.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::exported {
namespace {

constexpr std::string_view kOps = "torch.ops.";

/// None if the target is not written as an operator is.
std::optional<c10::OperatorName> parse_operator(const std::string& target) {
  if (!target.starts_with(kOps)) {
    return std::nullopt;
  }
  const std::string rest = target.substr(kOps.size());
  const size_t space = rest.find('.');
  const size_t overload = rest.rfind('.');
  if (space == rest.npos || overload == space) {
    return std::nullopt;
  }
  std::string name = rest.substr(overload + 1);
  return c10::OperatorName(
      rest.substr(0, space) +
          "::" + rest.substr(space + 1, overload - space - 1),
      name == "default" ? "" : std::move(name));
}

/// Namespaces whose operators no model has.
constexpr std::array<std::string_view, 14> kClosed{
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "_test",
    "c10d",
    "c10d_functional",
    "debug_mode_ops",
    "debugprims",
    "fsdp",
    "inductor",
    "profiler",
    "static_runtime",
    "symm_mem",
    "tessera"};

/// Operators of "aten" that no model has.
constexpr std::array<std::string_view, 2> kClosedOperators{
    "aten::from_file", // maps a file, or makes it
    "aten::record_stream"};

} // namespace

bool may_be_called(const std::string& target) {
  const auto name = parse_operator(target);
  if (!name) {
    return true; // and not found
  }
  const std::string_view space =
      std::string_view(name->name).substr(0, name->name.find("::"));
  const auto is_in = [](const auto& closed, std::string_view text) {
    return std::find(closed.begin(), closed.end(), text) != closed.end();
  };
  return !is_in(kClosed, space) && !is_in(kClosedOperators, name->name);
}

std::optional<c10::OperatorHandle> find_operator(const std::string& target) {
  const auto name = parse_operator(target);
  return name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
}

std::string operator_text(const std::string& target) {
  const auto name = parse_operator(target);
  return name ? c10::toString(*name) : target;
}

} // namespace tessera::exported
