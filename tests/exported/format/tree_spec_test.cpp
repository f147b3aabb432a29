#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/format/support.h"
#include "exported/format/tree_spec_reader.h"

namespace tessera::exported {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Kind = TreeSpec::Kind;
using Strings = std::vector<std::string>;

const std::string kLeaf =
    R"({"type": null, "context": null, "children_spec": []})";

TreeSpec read(const std::string& spec, const NamedTupleFields& fields = {}) {
  const json text = "[1, " + spec + "]";
  return read_tree_spec(JsonAt(text, "spec"), fields);
}

std::string refusal_of_tree(const std::string& spec) {
  return format::refusal([&] { read(spec); });
}

std::string node(
    const std::string& type,
    const std::string& context,
    int num_children) {
  std::string children;
  for (int i = 0; i < num_children; ++i) {
    children += (i ? ", " : "") + kLeaf;
  }
  return "{\"type\": \"" + type + "\", \"context\": " + context +
      ", \"children_spec\": [" + children + "]}";
}

void expect_tree(
    const TreeSpec& tree,
    Kind kind,
    const std::string& type,
    const Strings& keys) {
  EXPECT_EQ(tree.kind, kind) << type;
  EXPECT_EQ(tree.type_name, type);
  EXPECT_EQ(tree.keys, keys) << type;
}

TEST(TreeSpecTest, EveryKind) {
  expect_tree(read(kLeaf), Kind::Leaf, "", {});
  EXPECT_EQ(read(kLeaf).num_leaves(), 1);
  expect_tree(
      read(node("builtins.tuple", R"("null")", 3)),
      Kind::Tuple,
      "builtins.tuple",
      {});
  EXPECT_EQ(read(node("builtins.list", R"("null")", 3)).num_leaves(), 3);
  expect_tree(
      read(node("builtins.dict", R"("[\"a\", 2]")", 2)),
      Kind::Dict,
      "builtins.dict",
      {"a", "2"});
  expect_tree(
      read(node("collections.OrderedDict", R"("[\"k\"]")", 1)),
      Kind::Dict,
      "collections.OrderedDict",
      {"k"});
  expect_tree(
      read(node(
          "collections.defaultdict",
          R"({"default_factory_module": "builtins",
              "default_factory_name": "list", "dict_context": ["k"]})",
          1)),
      Kind::Dict,
      "collections.defaultdict",
      {"k"});
  expect_tree(
      read(
          node("collections.namedtuple", R"("a.Pair")", 2),
          {{"a.Pair", {"x", "y"}}}),
      Kind::NamedTuple,
      "a.Pair",
      {"x", "y"});
  expect_tree(
      read(node("builtins.NoneType", R"("null")", 0)),
      Kind::None,
      "builtins.NoneType",
      {});
}

TEST(TreeSpecTest, OtherTypesHaveKeysWhereTheirContextNamesThem) {
  const std::string type =
      "transformers.modeling_outputs.CausalLMOutputWithPast";
  expect_tree(
      read(node(type, R"("[\"loss\", \"logits\"]")", 2)),
      Kind::Other,
      type,
      {"loss", "logits"});
  // A dataclass: the fields that are there, and those that are None.
  expect_tree(
      read(node("a.Data", R"("[[\"x\"], [\"y\", \"z\"]]")", 1)),
      Kind::Other,
      "a.Data",
      {"x"});
  for (const auto* context :
       {R"("3")", R"("not JSON")", R"({"any": 1})", R"("[\"one\"]")", "null"}) {
    expect_tree(
        read(node("collections.deque", context, 2)),
        Kind::Other,
        "collections.deque",
        {});
  }
}

TEST(TreeSpecTest, WhatIsWrongIsNamed) {
  EXPECT_EQ(
      format::refusal([] {
        const json text = "[2, null]";
        read_tree_spec(JsonAt(text, "spec"), {});
      }),
      "spec has version 2 of TreeSpec, version 1 is read");
  EXPECT_THAT(
      refusal_of_tree(node("builtins.dict", R"("[\"a\"]")", 2)),
      HasSubstr("has 1 keys and 2 children"));
  EXPECT_THAT(
      refusal_of_tree(node("builtins.dict", R"("[\"a\", \"a\"]")", 2)),
      HasSubstr("repeats the key \"a\""));
  EXPECT_THAT(
      refusal_of_tree(node("builtins.dict", R"("[1.5]")", 1)),
      HasSubstr("is number, not an integer"));
  EXPECT_THAT(
      refusal_of_tree(node("builtins.dict", R"("[null]")", 1)),
      HasSubstr("neither a string nor an int"));
  EXPECT_THAT(
      refusal_of_tree(node("collections.namedtuple", R"("a.Pair")", 2)),
      HasSubstr("is the named tuple \"a.Pair\", whose fields"));
  EXPECT_THAT(
      refusal_of_tree(R"({"type": null, "context": "c", "children_spec": []})"),
      HasSubstr("is a leaf with children or a context"));
  EXPECT_THAT(
      refusal_of_tree(R"({"type": null, "children_spec": [], "x": 1})"),
      HasSubstr("has the field \"x\", which is not known"));
  std::string deep = kLeaf;
  for (int i = 0; i < 10000; ++i) {
    deep =
        R"({"type": "builtins.list", "context": "null", "children_spec": [)" +
        deep + "]}";
  }
  EXPECT_THAT(refusal_of_tree(deep), HasSubstr("nests too deeply"));
}

} // namespace
} // namespace tessera::exported
