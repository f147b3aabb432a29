#include "exported/format/tree_spec_reader.h"

#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/json.h"

namespace tessera::exported {
namespace {

constexpr int64_t kTreeSpecVersion = 1;
// Each level of a Python value takes two levels of JSON.
constexpr int kTreeSpecDepth = 256;
// Contexts are lists of keys; types of users may have anything.
constexpr int kContextDepth = 32;

using Kind = TreeSpec::Kind;

nlohmann::json parse(const JsonAt& at, int max_depth) {
  try {
    return format::read_json(at.string(), 0, max_depth);
  } catch (const format::FormatError& error) {
    at.fail(std::string("holds JSON that cannot be read: ") + error.what());
  }
}

// Keys are strings or ints; the text of an int is not told apart from a string.
std::vector<std::string> read_keys(const JsonAt& at) {
  std::vector<std::string> keys;
  std::set<std::string> seen;
  at.for_each_item([&](const JsonAt& item) {
    if (item.is_object() || item.is_array() || item.is_null()) {
      item.refuse("is a key that is neither a string nor an int");
    }
    std::string key =
        item.is_string() ? item.string() : std::to_string(item.integer());
    if (!seen.insert(key).second) {
      item.fail("repeats the key " + format::in_quotes(key));
    }
    keys.push_back(std::move(key));
  });
  return keys;
}

bool is_list_of_strings(const nlohmann::json& json) {
  if (!json.is_array()) {
    return false;
  }
  for (const auto& item : json) {
    if (!item.is_string()) {
      return false;
    }
  }
  return true;
}

Kind kind_of(std::string_view type) {
  if (type == "builtins.tuple") {
    return Kind::Tuple;
  }
  if (type == "builtins.list" ||
      type == "torch.fx.immutable_collections.immutable_list") {
    return Kind::List;
  }
  if (type == "builtins.dict" || type == "collections.OrderedDict" ||
      type == "collections.defaultdict" ||
      type == "torch.fx.immutable_collections.immutable_dict") {
    return Kind::Dict;
  }
  if (type == "collections.namedtuple") {
    return Kind::NamedTuple;
  }
  if (type == "builtins.NoneType") {
    return Kind::None;
  }
  return Kind::Other;
}

class TreeReader {
 public:
  explicit TreeReader(const NamedTupleFields& named_tuples)
      : named_tuples_(named_tuples) {}

  TreeSpec read(const JsonAt& at) const {
    at.expect_only({"type", "context", "children_spec"});
    TreeSpec tree;
    at.at("children_spec").for_each_item([&](const JsonAt& child) {
      tree.children.push_back(read(child));
    });
    if (!at.has("type")) {
      if (!tree.children.empty() || at.has("context")) {
        at.fail("is a leaf with children or a context");
      }
      return tree;
    }
    tree.type_name = at.at("type").string();
    tree.kind = kind_of(tree.type_name);
    read_context(at.at("context"), &tree);
    check(at, tree);
    return tree;
  }

 private:
  void read_context(const JsonAt& context, TreeSpec* tree) const {
    switch (tree->kind) {
      case Kind::Dict:
        if (tree->type_name == "collections.defaultdict") {
          context.expect_only(
              {"default_factory_module",
               "default_factory_name",
               "dict_context"});
          tree->keys = read_keys(context.at("dict_context"));
        } else {
          const auto json = parse(context, kContextDepth);
          tree->keys = read_keys(JsonAt(json, context.place()));
        }
        break;
      case Kind::NamedTuple:
        take_named_tuple(context, tree);
        break;
      case Kind::Other:
        tree->keys = keys_of_other(context, tree->children.size());
        break;
      case Kind::Leaf:
      case Kind::None:
      case Kind::Tuple:
      case Kind::List:
        break;
    }
  }

  void take_named_tuple(const JsonAt& context, TreeSpec* tree) const {
    tree->type_name = context.string();
    const auto fields = named_tuples_.find(tree->type_name);
    if (fields == named_tuples_.end()) {
      context.fail(
          "is the named tuple " + format::in_quotes(tree->type_name) +
          ", whose fields treespec_namedtuple_fields does not list");
    }
    tree->keys = fields->second;
  }

  // Outputs of Hugging Face have a list of keys; torch's dataclasses have two
  // lists, the fields that are there and those that are None. Other types have
  // contexts of their own, which say nothing here.
  static std::vector<std::string> keys_of_other(
      const JsonAt& context,
      size_t num_children) {
    if (!context.is_string()) {
      return {};
    }
    nlohmann::json json;
    try {
      json = format::read_json(context.string(), 0, kContextDepth);
    } catch (const format::FormatError&) {
      return {}; // such a type writes something else than JSON
    }
    if (json.is_array() && json.size() == 2 && is_list_of_strings(json[0]) &&
        is_list_of_strings(json[1])) {
      json = nlohmann::json(json[0]);
    }
    if (!is_list_of_strings(json) || json.size() != num_children) {
      return {};
    }
    return json.get<std::vector<std::string>>();
  }

  static void check(const JsonAt& at, const TreeSpec& tree) {
    const bool has_keys =
        tree.kind == Kind::Dict || tree.kind == Kind::NamedTuple;
    if (has_keys && tree.keys.size() != tree.children.size()) {
      at.fail(
          "has " + std::to_string(tree.keys.size()) + " keys and " +
          std::to_string(tree.children.size()) + " children");
    }
    if (tree.kind == Kind::None && !tree.children.empty()) {
      at.fail("is None and has children");
    }
  }

  const NamedTupleFields& named_tuples_;
};

} // namespace

TreeSpec read_tree_spec(
    const JsonAt& at,
    const NamedTupleFields& named_tuples) {
  const auto json = parse(at, kTreeSpecDepth);
  const std::string place = at.place();
  const JsonAt root(json, place);
  const int64_t version = root.at(0).integer();
  if (version != kTreeSpecVersion) {
    root.refuse(
        "has version " + std::to_string(version) + " of TreeSpec, version " +
        std::to_string(kTreeSpecVersion) + " is read");
  }
  if (root.size() != 2) {
    root.fail("has " + std::to_string(root.size()) + " items, not 2");
  }
  return TreeReader(named_tuples).read(root.at(1));
}

} // namespace tessera::exported
