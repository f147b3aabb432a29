#include "checkpoint/format/pickle_graph.h"

#include <algorithm>
#include <string>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_calls.h"

namespace tessera::format {
namespace {

// How many values the tree of a pickle of this size may have: enough for the
// sharing in real pickles, but not so many that sharing can exhaust memory.
struct Allowance {
  explicit Allowance(uint64_t input_bytes)
      : values(2 * input_bytes + 4096), text_bytes(64 * input_bytes + 65536) {}

  uint64_t values;
  uint64_t text_bytes;
};

size_t num_children(const Node& node) {
  return node.children.size() + (node.state != kNoNode);
}

uint32_t child(const Node& node, size_t i) {
  return i < node.children.size() ? node.children[i] : node.state;
}

// Walks the graph once, depth first, without recursion.
class Measure {
 public:
  Measure(const std::vector<Node>& nodes, Allowance allowance)
      : nodes_(nodes), allowance_(allowance), seen_(nodes.size()) {}

  void run(uint32_t root) {
    enter(root);
    while (!path_.empty()) {
      auto& [id, next] = path_.back();
      if (next < num_children(nodes_[id])) {
        const uint32_t below = child(nodes_[id], next++);
        switch (seen_[below].stage) {
          case Stage::New:
            enter(below); // invalidates id and next
            break;
          case Stage::OnPath:
            throw FormatError(nodes_[below].at, "a value contains itself");
          case Stage::Done:
            add(id, below);
            break;
        }
      } else {
        const uint32_t done = id;
        seen_[done].stage = Stage::Done;
        path_.pop_back();
        if (!path_.empty()) {
          add(path_.back().first, done);
        }
      }
    }
  }

 private:
  enum class Stage : uint8_t { New, OnPath, Done };
  struct Seen {
    uint64_t values = 1;
    uint64_t text_bytes = 0;
    uint8_t depth = 1;
    Stage stage = Stage::New;
  };
  static_assert(kMaxNesting < UINT8_MAX);

  void enter(uint32_t id) {
    if (path_.size() >= kMaxNesting) {
      too_deep(id);
    }
    seen_[id].stage = Stage::OnPath;
    seen_[id].text_bytes = nodes_[id].text.size();
    path_.emplace_back(id, 0);
  }

  void add(uint32_t id, uint32_t below) {
    auto& to = seen_[id];
    const size_t depth = seen_[below].depth + 1u;
    if (depth > kMaxNesting) {
      too_deep(below);
    }
    to.depth = std::max(to.depth, static_cast<uint8_t>(depth));
    // Both were within the allowance, so they do not overflow.
    to.values += seen_[below].values;
    to.text_bytes += seen_[below].text_bytes;
    if (to.values > allowance_.values ||
        to.text_bytes > allowance_.text_bytes) {
      throw FormatError(
          nodes_[id].at,
          "the pickle repeats values until they are too many for its size");
    }
  }

  [[noreturn]] void too_deep(uint32_t id) {
    throw FormatError(
        nodes_[id].at,
        "values are nested more than " + std::to_string(kMaxNesting) + " deep");
  }

  const std::vector<Node>& nodes_;
  const Allowance allowance_;
  std::vector<Seen> seen_;
  std::vector<std::pair<uint32_t, size_t>> path_; // node, its next child
};

// The recursion is as deep as the tree, whose depth has been checked.
class Builder {
 public:
  explicit Builder(const std::vector<Node>& nodes) : nodes_(nodes) {}

  Value build(uint32_t id) const {
    const Node& node = nodes_[id];
    switch (node.kind) {
      case Node::Kind::None:
        return None{};
      case Node::Kind::Bool:
        return node.integer != 0;
      case Node::Kind::Int:
        return node.integer;
      case Node::Kind::Float:
        return node.number;
      case Node::Kind::Text:
        return std::string(node.text);
      case Node::Kind::Bytes:
        return Bytes{std::string(node.text)};
      case Node::Kind::List:
        return List{items(node)};
      case Node::Kind::Tuple:
        return Tuple{items(node)};
      case Node::Kind::Set:
        return Set{items(node)};
      case Node::Kind::Dict:
        return dict(node);
      case Node::Kind::Global:
        return global(node);
      case Node::Kind::Call:
        return call(node);
      case Node::Kind::Persistent:
        return storage(node);
    }
    throw FormatError(node.at, "unknown node"); // not reached
  }

 private:
  std::vector<Value> items(const Node& node) const {
    std::vector<Value> values;
    values.reserve(node.children.size());
    for (const uint32_t id : node.children) {
      values.push_back(build(id));
    }
    return values;
  }

  Dict dict(const Node& node) const {
    Dict dict;
    dict.items.reserve(node.children.size() / 2);
    for (size_t i = 0; i < node.children.size(); i += 2) {
      dict.add(build(node.children[i]), build(node.children[i + 1]));
    }
    return dict;
  }

  Value global(const Node& node) const {
    if (node.global.global != Global::DType) {
      throw FormatError(
          node.at, "a class or function stands where a value belongs");
    }
    return node.global.dtype;
  }

  Value call(const Node& node) const {
    if (node.global.global == Global::GetAttr) {
      return member(node);
    }
    Call call{
        .callee = node.global,
        .at = node.at,
        .args = items(nodes_[node.children[0]]),
        .state = std::nullopt};
    if (node.state != kNoNode) {
      call.state = build(node.state);
    }
    return result_of(std::move(call));
  }

  // getattr(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
  Value member(const Node& node) const {
    const auto& args = nodes_[node.children[0]].children;
    if (args.size() == 2 && nodes_[args[0]].kind == Node::Kind::Global &&
        nodes_[args[0]].global.global == Global::MemoryFormat &&
        nodes_[args[1]].kind == Node::Kind::Text) {
      return memory_format_named(nodes_[args[1]].text, node.at);
    }
    throw FormatError(node.at, "getattr is for memory formats only");
  }

  // ("storage", type, key, location, count)
  Value storage(const Node& node) const {
    const Node& id = nodes_[node.children[0]];
    const auto is = [&](size_t i, Node::Kind kind) {
      return nodes_[id.children[i]].kind == kind;
    };
    if (id.kind != Node::Kind::Tuple || id.children.size() != 5 ||
        !is(0, Node::Kind::Text) || !is(1, Node::Kind::Global) ||
        !is(2, Node::Kind::Text) || !is(3, Node::Kind::Text) ||
        !is(4, Node::Kind::Int) || nodes_[id.children[0]].text != "storage") {
      throw FormatError(
          node.at, "a persistent id that does not name a storage");
    }
    const GlobalRef type = nodes_[id.children[1]].global;
    if (type.global != Global::TypedStorage &&
        type.global != Global::UntypedStorage) {
      throw FormatError(node.at, "a storage whose type is none");
    }
    Storage storage{
        .key = std::string(nodes_[id.children[2]].text),
        .dtype = std::nullopt,
        .location = std::string(nodes_[id.children[3]].text),
        .numel = nodes_[id.children[4]].integer};
    if (type.global == Global::TypedStorage) {
      storage.dtype = type.dtype;
    }
    if (storage.numel < 0) {
      throw FormatError(node.at, "a storage of fewer than 0 elements");
    }
    return storage;
  }

  const std::vector<Node>& nodes_;
};

} // namespace

Value to_value(
    const std::vector<Node>& nodes,
    uint32_t root,
    uint64_t input_bytes) {
  Measure(nodes, Allowance(input_bytes)).run(root);
  return Builder(nodes).build(root);
}

} // namespace tessera::format
