#include "exported/node_text.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "exported/overloaded.h"

namespace tessera::exported {
namespace {

/// Where the last line of a Python stack trace that names a file and a line
/// begins; if there is one, the last that is not torch's own.
size_t last_place(const std::string& trace) {
  const size_t last = trace.rfind("File \"");
  size_t file = last;
  while (file != trace.npos) {
    const size_t end = trace.find('"', file + 6);
    const std::string path = trace.substr(file + 6, end - file - 6);
    if (path.find("/torch/") == path.npos) {
      return file;
    }
    file = file == 0 ? trace.npos : trace.rfind("File \"", file - 1);
  }
  return last;
}

/// That line, and the code below it.
std::string last_line_of(const std::string& trace) {
  const size_t file = last_place(trace);
  if (file == trace.npos) {
    return "";
  }
  std::string line = trace.substr(file);
  const size_t end = line.find('\n');
  const size_t code =
      end == line.npos ? line.npos : line.find_first_not_of(" \n", end);
  const std::string place = line.substr(0, end);
  if (code == line.npos) {
    return place;
  }
  return place + ": " + line.substr(code, line.find('\n', code) - code);
}

} // namespace

std::string first_name(const Node& node) {
  for (const Argument& output : node.outputs) {
    const std::string name = std::visit(
        Overloaded{
            [](const TensorName& tensor) { return tensor.name; },
            [](const std::vector<TensorName>& tensors) {
              return tensors.empty() ? std::string() : tensors.front().name;
            },
            []<class Number>(const Symbolic<Number>& number) {
              const auto* text = std::get_if<std::string>(&number.value);
              return text != nullptr ? *text : std::string();
            },
            [](const auto&) { return std::string(); }},
        output.value);
    if (!name.empty()) {
      return name;
    }
  }
  return "";
}

std::string describe_node(const Node& node) {
  const std::string name = first_name(node);
  std::string text = name.empty()
      ? fmt::format("in a node of {}", node.target)
      : fmt::format("in node \"{}\" of {}", name, node.target);
  if (!node.modules.empty() && !node.modules.back().path.empty()) {
    text += fmt::format(", module \"{}\"", node.modules.back().path);
  }
  const std::string line = last_line_of(node.stack_trace);
  return line.empty() ? text : text + ", " + line;
}

std::string dtype_text(c10::ScalarType dtype) {
  const std::string name(c10::getDtypeNames(dtype).first);
  return (name.starts_with('i') ? "an " : "a ") + name;
}

} // namespace tessera::exported
