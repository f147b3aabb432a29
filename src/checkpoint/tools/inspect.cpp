#include "checkpoint/tools/inspect.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/json_text.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::ordered_json;
using Keys = std::vector<format::DcpPath::Key>;

constexpr size_t kWidestName = 60;

// Names of the files that hold a tensor, in their order.
std::vector<std::string> files_of(
    const Source& source,
    const StoredTensor& tensor) {
  std::vector<std::string> names;
  for (const auto& box : tensor.boxes) {
    const auto& name = source.files()[source.range_of(box.item).file].name;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  return names;
}

std::string value_or_error(const Source& source, const StoredValue& value) {
  try {
    return value_text(source.value(value));
  } catch (const FileError& error) {
    return std::string("CANNOT BE READ: ") + error.what();
  }
}

std::string files_text(const std::vector<std::string>& files) {
  if (files.empty()) {
    return "";
  }
  return files.size() == 1
      ? files[0]
      : files[0] + " and " + count_text(files.size() - 1, "other file");
}

// Tensors and values below a name.
struct Sum {
  uint64_t tensors = 0;
  uint64_t values = 0;
  uint64_t bytes = 0;

  Sum& operator+=(const Sum& other) {
    tensors += other.tensors;
    values += other.values;
    bytes += other.bytes;
    return *this;
  }
};

std::string sum_text(const Sum& sum) {
  std::string text;
  if (sum.tensors > 0) {
    text = count_text(sum.tensors, "tensor") + ", " + bytes_text(sum.bytes);
  }
  if (sum.values > 0) {
    text += (text.empty() ? "" : ", ") + count_text(sum.values, "value");
  }
  return text;
}

// A line of the tree: a tensor or a value.
struct Line {
  Keys keys;
  std::string text;
  std::vector<std::string> below;
  Sum sum;
  bool names_boxes = false;
};

std::string tensor_text(const Source& source, const StoredTensor& tensor) {
  std::string text(format::info(tensor.dtype).torch_name);
  text += "  " + sizes_text(tensor.sizes) + "  " + bytes_text(tensor.bytes());
  if (tensor.boxes.size() > 1) {
    text += "  " + std::to_string(tensor.boxes.size()) + " boxes";
  }
  if (source.files().size() > 1) {
    text += "  " + files_text(files_of(source, tensor));
  }
  return text;
}

std::vector<std::string> box_texts(
    const Source& source,
    const StoredTensor& tensor) {
  std::vector<std::string> texts;
  for (const auto& box : tensor.boxes) {
    const FileRange range = source.range_of(box.item);
    texts.push_back(
        "box " + sizes_text(box.sizes) + " at " + sizes_text(box.offsets) +
        "  " + source.files()[range.file].name + ", bytes " +
        std::to_string(range.begin) + " to " + std::to_string(range.end));
  }
  return texts;
}

std::vector<Line> lines_of(const Source& source, bool boxes) {
  std::vector<Line> lines;
  for (const auto& tensor : source.tensors()) {
    lines.push_back(
        {.keys = tensor.keys,
         .text = tensor_text(source, tensor),
         .below =
             boxes ? box_texts(source, tensor) : std::vector<std::string>{},
         .sum = {.tensors = 1, .bytes = tensor.bytes()},
         .names_boxes = boxes || tensor.boxes.size() > 1});
  }
  for (const auto& value : source.values()) {
    lines.push_back(
        {.keys = value.keys,
         .text = "= " + value_or_error(source, value),
         .below = {},
         .sum = {.values = 1}});
  }
  return lines;
}

// Keys in the order in which they first appear, children below their parents.
struct Node {
  std::string key;
  const Line* line = nullptr;
  std::vector<Node> children;
  std::map<std::string, size_t> places;

  Sum sum() const {
    Sum result = line ? line->sum : Sum{};
    for (const Node& child : children) {
      result += child.sum();
    }
    return result;
  }
};

// Takes away what lies deeper than `depth`; `cut_lines` keeps the lines that
// say what was there.
void cut(Node& node, size_t depth, std::deque<Line>& cut_lines) {
  if (depth > 0) {
    for (Node& child : node.children) {
      cut(child, depth - 1, cut_lines);
    }
    return;
  }
  if (!node.children.empty()) {
    cut_lines.push_back({.text = "... " + sum_text(node.sum())});
    node.line = &cut_lines.back();
    node.children.clear();
  }
}

Node tree_of(const std::vector<Line>& lines) {
  Node root;
  for (const auto& line : lines) {
    Node* node = &root;
    for (const auto& key : line.keys) {
      const std::string text = key_text(key);
      const auto [found, is_new] =
          node->places.emplace(text, node->children.size());
      if (is_new) {
        node->children.push_back({.key = text});
      }
      node = &node->children[found->second];
    }
    node->line = &line;
  }
  return root;
}

// Characters, not bytes.
size_t columns(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

size_t width_of(const Node& node, size_t depth) {
  size_t width = node.line ? 2 * depth + columns(node.key) : 0;
  for (const auto& child : node.children) {
    width = std::max(width, width_of(child, depth + 1));
  }
  return width;
}

void print(const Node& node, size_t depth, size_t width, std::string* out) {
  std::string text(2 * depth, ' ');
  text += node.key;
  if (node.line) {
    const size_t used = columns(text);
    text.append(used < width ? width - used : 0, ' ');
    text += "  " + node.line->text;
  }
  *out += text + "\n";
  if (node.line) {
    for (const auto& below : node.line->below) {
      *out += std::string(2 * depth + 4, ' ') + below + "\n";
    }
  }
  for (const auto& child : node.children) {
    print(child, depth + 1, width, out);
  }
}

struct Totals {
  uint64_t tensor_bytes = 0;
  uint64_t file_bytes = 0;
  int64_t numel = 0;
  std::map<std::string, uint64_t> by_dtype;
};

Totals totals_of(const Source& source) {
  Totals totals;
  for (const auto& tensor : source.tensors()) {
    totals.tensor_bytes += tensor.bytes();
    totals.numel += tensor.numel();
    totals.by_dtype[std::string(format::info(tensor.dtype).torch_name)] +=
        tensor.bytes();
  }
  for (const auto& file : source.files()) {
    totals.file_bytes += file.bytes;
  }
  return totals;
}

std::string totals_text(const Source& source) {
  const Totals totals = totals_of(source);
  std::string text = count_text(source.tensors().size(), "tensor") + " with " +
      count_text(static_cast<uint64_t>(totals.numel), "element") + ", " +
      bytes_text(totals.tensor_bytes);
  if (!totals.by_dtype.empty()) {
    text += " (";
    bool is_first = true;
    for (const auto& [dtype, bytes] : totals.by_dtype) {
      text += (is_first ? "" : ", ") + dtype + " " + bytes_text(bytes);
      is_first = false;
    }
    text += ")";
  }
  return text + "; " + count_text(source.values().size(), "other value") +
      "; " + count_text(source.files().size(), "file") + ", " +
      bytes_text(totals.file_bytes) +
      (source.checksums() ? ", with checksums\n" : "\n");
}

bool names_boxes(const Node& node) {
  return (node.line && node.line->names_boxes) ||
      std::any_of(node.children.begin(), node.children.end(), names_boxes);
}

// What the words in the tree mean, for those that stand there.
std::string words_text(const Node& root) {
  return names_boxes(root)
      ? "A box is the part of a tensor that one rank saved.\n"
      : "";
}

ordered_json keys_json(const Keys& keys) {
  ordered_json list = ordered_json::array();
  for (const auto& key : keys) {
    std::visit([&](const auto& part) { list.push_back(part); }, key);
  }
  return list;
}

ordered_json tensor_json(const Source& source, const StoredTensor& tensor) {
  ordered_json boxes = ordered_json::array();
  for (const auto& box : tensor.boxes) {
    const FileRange range = source.range_of(box.item);
    boxes.push_back(
        {{"offsets", box.offsets},
         {"sizes", box.sizes},
         {"file", source.files()[range.file].name},
         {"begin", range.begin},
         {"end", range.end}});
  }
  return {
      {"name", tensor.name},
      {"path", keys_json(tensor.keys)},
      {"dtype", format::info(tensor.dtype).torch_name},
      {"sizes", tensor.sizes},
      {"bytes", tensor.bytes()},
      {"boxes", std::move(boxes)}};
}

} // namespace

std::string inspect_text(const Source& source, const InspectOptions& options) {
  const auto lines = lines_of(source, options.boxes);
  Node root = tree_of(lines);
  std::deque<Line> cut_lines;
  if (options.depth) {
    cut(root, *options.depth, cut_lines);
  }
  std::string out =
      source.path().string() + ": " + name_of(source.format()) + "\n";
  const size_t width = std::min(width_of(root, 0), kWidestName);
  for (const auto& child : root.children) {
    print(child, 1, width, &out);
  }
  for (const auto& [name, text] : source.notes()) {
    out += "note " + format::in_quotes(name) + ": " + format::in_quotes(text) +
        "\n";
  }
  return out + totals_text(source) + words_text(root);
}

std::string inspect_json(const Source& source) {
  const Totals totals = totals_of(source);
  ordered_json json{
      {"path", source.path().string()},
      {"format", name_of(source.format())},
      {"has_checksums", source.checksums() != nullptr},
      {"tensor_bytes", totals.tensor_bytes},
      {"file_bytes", totals.file_bytes},
      {"numel", totals.numel}};
  json["files"] = ordered_json::array();
  for (const auto& file : source.files()) {
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  json["notes"] = source.notes();
  json["tensors"] = ordered_json::array();
  for (const auto& tensor : source.tensors()) {
    json["tensors"].push_back(tensor_json(source, tensor));
  }
  json["values"] = ordered_json::array();
  for (const auto& value : source.values()) {
    json["values"].push_back(
        {{"name", value.name},
         {"path", keys_json(value.keys)},
         {"text", value_or_error(source, value)}});
  }
  // Names in torch files need not be UTF-8; invalid bytes are replaced.
  return json_text(json);
}

} // namespace tessera::checkpoint
