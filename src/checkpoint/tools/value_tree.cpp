#include "checkpoint/tools/value_tree.h"

#include <utility>
#include <variant>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/tools/checkpoint_text.h"

namespace tessera::checkpoint {
namespace {

// A list in a hostile checkpoint may claim any number of positions.
constexpr int64_t kMostPlaces = 1 << 20;

bool is_position(const EntryPath::Key& key) {
  return std::holds_alternative<int64_t>(key.key);
}

} // namespace

void ValueTree::add(const EntryPath& path, format::Value value) {
  Node* node = &root_;
  for (const auto& key : path.keys) {
    const std::string text = key_text(key.key);
    if (node->value ||
        (!node->children.empty() &&
         is_position(node->children.front()->key) != is_position(key))) {
      throw FileError(
          "entry " + format::in_quotes(path.name()) +
          ": another entry is in its way, which is " +
          (node->value ? "a value"
                       : "a list in one and a dictionary in the other") +
          " above it. Rename one with --strip-prefix, or leave it out with --select.");
    }
    if (is_position(key) &&
        (std::get<int64_t>(key.key) < 0 ||
         std::get<int64_t>(key.key) >= kMostPlaces)) {
      throw FileError(
          "entry " + format::in_quotes(path.name()) + ": position " + text +
          " in a list is too large");
    }
    Node*& child = node->by_key[text];
    if (!child) {
      node->children.push_back(std::make_unique<Node>());
      child = node->children.back().get();
      child->key = key;
    }
    node = child;
  }
  if (node->value || !node->children.empty()) {
    throw FileError(
        "entry " + format::in_quotes(path.name()) +
        ": another entry has its place");
  }
  node->value = std::move(value);
}

format::Value ValueTree::take() && {
  return build(root_);
}

format::Value ValueTree::build(Node& node) {
  if (node.value) {
    return std::move(*node.value);
  }
  if (!node.children.empty() && is_position(node.children.front()->key)) {
    format::List list;
    for (auto& child : node.children) {
      const auto place = static_cast<size_t>(std::get<int64_t>(child->key.key));
      if (list.items.size() <= place) {
        list.items.resize(place + 1);
      }
      list.items[place] = build(*child);
    }
    return list;
  }
  format::Dict dict;
  for (auto& child : node.children) {
    const std::string text = key_text(child->key.key);
    dict.add(
        child->key.was_int ? format::Value(int64_t{std::stoll(text)})
                           : format::Value(text),
        build(*child));
  }
  return dict;
}

} // namespace tessera::checkpoint
