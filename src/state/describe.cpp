#include "state/describe.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ostream>

namespace tessera {
namespace {

void print(std::string& text, const StateValue& value, int depth);

void print(std::string& text, const StateDict& dict, int depth) {
  for (const auto& [key, value] : dict) {
    text += fmt::format("{:{}}{}:", "", 2 * depth, key.text());
    print(text, value, depth);
  }
}

/// The value after its key: on the same line, or indented below.
void print(std::string& text, const StateValue& value, int depth) {
  const auto has_depth = [](const StateValue& item) {
    return item.is_dict() || item.is_list();
  };
  if (value.is_dict() && !value.dict().empty()) {
    text += "\n";
    print(text, value.dict(), depth + 1);
  } else if (
      value.is_list() &&
      std::any_of(value.list().begin(), value.list().end(), has_depth)) {
    text += "\n";
    for (size_t i = 0; i < value.list().size(); ++i) {
      text += fmt::format("{:{}}- {}:", "", 2 * (depth + 1), i);
      print(text, value.list()[i], depth + 2);
    }
  } else if (value.is_list()) {
    constexpr size_t kShown = 8;
    text += " [";
    for (size_t i = 0; i < value.list().size() && i < kShown; ++i) {
      text += (i == 0 ? "" : ", ") + state::describe(value.list()[i]);
    }
    text += value.list().size() > kShown
        ? fmt::format(", ... {} items]\n", value.list().size())
        : "]\n";
  } else {
    text += " " + state::describe(value) + "\n";
  }
}

} // namespace

namespace state {

std::string number(const at::Tensor& scalar) {
  if (scalar.is_complex()) {
    const auto value = scalar.item<c10::complex<double>>();
    return fmt::format("{}+{}i", value.real(), value.imag());
  }
  if (scalar.is_floating_point()) {
    return scalar.scalar_type() == at::kDouble
        ? fmt::format("{}", scalar.item<double>())
        : fmt::format("{}", scalar.item<float>());
  }
  return fmt::format("{}", scalar.item<int64_t>());
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "undefined tensor";
  }
  std::string text = fmt::format(
      "{} [{}] on {}",
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "),
      tensor.device().str());
  if (tensor.numel() == 0 || tensor.is_meta()) {
    return text;
  }
  constexpr int64_t kShown = 4;
  const at::Tensor first = tensor.detach()
                               .reshape({-1})
                               .narrow(0, 0, std::min(tensor.numel(), kShown))
                               .cpu();
  for (int64_t i = 0; i < first.numel(); ++i) {
    text += (i == 0 ? ": " : ", ") + number(first[i]);
  }
  return text + (tensor.numel() > kShown ? ", ..." : "");
}

std::string describe(const ShardedTensor& tensor) {
  std::string text = fmt::format(
      "sharded {} [{}]",
      c10::toString(tensor.dtype()),
      fmt::join(tensor.sizes(), ", "));
  text += tensor.pieces().empty() ? ", nothing here" : ", here";
  for (const auto& piece : tensor.pieces()) {
    std::vector<std::string> ranges;
    for (size_t dim = 0; dim < piece.box.offsets.size(); ++dim) {
      ranges.push_back(fmt::format(
          "{}:{}",
          piece.box.offsets[dim],
          piece.box.offsets[dim] + piece.box.sizes[dim]));
    }
    text += fmt::format(" [{}]", fmt::join(ranges, ", "));
  }
  return text;
}

std::string describe(const StateValue& value) {
  if (value.is_tensor()) {
    return describe(value.tensor());
  }
  if (value.is_sharded()) {
    return describe(value.sharded());
  }
  if (value.is_int()) {
    return std::to_string(value.to_int());
  }
  if (value.is_double()) {
    return fmt::format("{}", value.to_double());
  }
  if (value.is_bool()) {
    return value.to_bool() ? "true" : "false";
  }
  if (value.is_string()) {
    return "\"" + value.string() + "\"";
  }
  if (value.is_list()) {
    return fmt::format("a list of {}", value.list().size());
  }
  if (value.is_dict()) {
    return fmt::format("a dict of {}", value.dict().size());
  }
  return "None";
}

} // namespace state

std::string StateDict::to_string() const {
  std::string text;
  print(text, *this, 0);
  return text;
}

std::ostream& operator<<(std::ostream& out, const StateDict& dict) {
  return out << dict.to_string();
}

std::ostream& operator<<(std::ostream& out, const StateValue& value) {
  if (!value.is_dict()) {
    return out << state::describe(value);
  }
  return out << value.dict();
}

} // namespace tessera
