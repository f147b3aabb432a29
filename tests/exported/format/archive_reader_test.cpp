#include "exported/format/archive_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "exported/format/archives.h"

namespace tessera::exported {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PythonArchiveTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!PythonArchives::get()) {
      GTEST_SKIP() << "this LibTorch came without Python";
    }
  }
  static Archive archive(const std::string& name) {
    return read(PythonArchives::get()->bytes(name));
  }
};

std::vector<int64_t> numbers(const std::vector<Expression<int64_t>>& values) {
  std::vector<int64_t> all;
  for (const auto& value : values) {
    all.push_back(std::get<int64_t>(value.value));
  }
  return all;
}

// The elements of a tensor in order, by its strides, in hexadecimal.
std::string elements_of(const std::string& archive, const Payload& payload) {
  const auto sizes = numbers(payload.meta.sizes);
  const auto strides = numbers(payload.meta.strides);
  const int64_t width = format::element_bytes(payload.meta.dtype);
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  std::string text;
  for (int64_t i = 0; i < numel; ++i) {
    int64_t place = std::get<int64_t>(payload.meta.storage_offset.value);
    int64_t rest = i;
    for (size_t dim = sizes.size(); dim-- > 0;) {
      place += rest % sizes[dim] * strides[dim];
      rest /= sizes[dim];
    }
    for (int64_t b = 0; b < width; ++b) {
      char digits[3];
      const auto byte = static_cast<uint8_t>(archive.at(
          payload.offset + static_cast<uint64_t>(place * width + b)));
      std::snprintf(digits, sizeof(digits), "%02x", byte);
      text += digits;
    }
  }
  return text;
}

TEST_F(PythonArchiveTest, HasTheTensorsOfPythonBitByBit) {
  for (const auto* name : {"model", "dtypes", "shared_configs", "one_config"}) {
    const auto bytes = PythonArchives::get()->bytes(name);
    const auto found = read(bytes);
    const auto expected = PythonArchives::get()->expected(name);
    ASSERT_GT(expected.size(), 15) << name;
    size_t num_tensors = 0;
    for (const auto* tensors : {&found.weights, &found.constants.at("model")}) {
      for (const auto& [path, payload] : *tensors) {
        SCOPED_TRACE(std::string(name) + ": " + path);
        const auto& tensor = expected.at(path);
        EXPECT_EQ(
            format::info(payload.meta.dtype).torch_name, tensor.at("dtype"));
        EXPECT_EQ(numbers(payload.meta.sizes), tensor.at("sizes"));
        EXPECT_EQ(elements_of(bytes, payload), tensor.at("bytes"));
        EXPECT_FALSE(payload.is_missing);
        ++num_tensors;
      }
    }
    EXPECT_EQ(num_tensors, expected.size()) << name;
  }
}

TEST_F(PythonArchiveTest, TiedWeightsLieAtOnePlaceAndViewsShareAStorage) {
  const auto found = archive("model");
  const auto& weights = found.weights;
  EXPECT_EQ(
      weights.at("embedding.weight").offset, weights.at("head.weight").offset);
  EXPECT_EQ(weights.at("left").offset, weights.at("right").offset);
  EXPECT_EQ(
      std::get<int64_t>(weights.at("right").meta.storage_offset.value), 3);
  EXPECT_EQ(
      numbers(weights.at("turned").meta.strides), (std::vector<int64_t>{1, 4}));
  EXPECT_TRUE(weights.at("turned").is_parameter);
  EXPECT_TRUE(weights.at("turned").meta.requires_grad);
  EXPECT_FALSE(weights.at("left").is_parameter);
  EXPECT_EQ(weights.count("blocks.0.scale"), 0);
  EXPECT_EQ(found.constants.at("model").count("blocks.0.scale"), 1);
}

TEST_F(PythonArchiveTest, ProgramsShareWeightsWithAndWithoutConfigsOfTheirOwn) {
  for (const auto* name : {"shared_configs", "one_config"}) {
    const auto found = archive(name);
    EXPECT_EQ(found.programs.size(), 2) << name;
    EXPECT_EQ(found.weights.size(), 23) << name;
    EXPECT_EQ(
        found.constants.at("eval").at("blocks.0.scale").offset,
        found.constants.at("model").at("blocks.0.scale").offset);
    EXPECT_GT(
        found.programs.at("model").graph.nodes.size(),
        found.programs.at("eval").graph.nodes.size());
  }
}

TEST_F(PythonArchiveTest, WeightsOfAFakeModelAreMissing) {
  const auto found = archive("fake");
  EXPECT_FALSE(found.names_missing); // torch.export.save wrote it
  EXPECT_EQ(found.weights.size(), 4);
  for (const auto& [path, payload] : found.weights) {
    EXPECT_TRUE(payload.is_missing) << path;
    EXPECT_EQ(payload.size, 0) << path;
  }
  EXPECT_EQ(
      numbers(found.weights.at("1.weight").meta.sizes),
      (std::vector<int64_t>{4, 8}));
}

const Node& node_named(const Graph& graph, const std::string& name) {
  for (const auto& node : graph.nodes) {
    if (node.name == name) {
      return node;
    }
  }
  throw std::runtime_error("no node " + name);
}

TEST_F(PythonArchiveTest, NodesSayWhichModulesTheyCameFrom) {
  const auto found = archive("model");
  const auto& graph = found.programs.at("model").graph;
  std::vector<std::pair<std::string, int64_t>> odd;
  for (const auto& node : graph.nodes) {
    if (node.modules.size() > 1 && node.modules.back().path == "odd.a,b;c") {
      EXPECT_EQ(
          node.modules.back().class_name, "torch.nn.modules.linear.Linear");
      EXPECT_THAT(node.stack_trace, HasSubstr("make_archives.py"));
      odd.emplace_back(node.target, node.modules.back().call);
    }
  }
  EXPECT_EQ(
      odd,
      (std::vector<std::pair<std::string, int64_t>>{
          {"torch.ops.aten.linear.default", 0},
          {"torch.ops.aten.linear.default", 1}}));
  const auto& norm = node_named(graph, "batch_norm_1");
  ASSERT_EQ(norm.modules.size(), 3);
  EXPECT_EQ(norm.modules[0].path, "");
  EXPECT_EQ(norm.modules[0].class_name, "__main__.Model");
  EXPECT_EQ(norm.modules[1].path, "blocks.1");
  EXPECT_EQ(norm.modules[2].path, "blocks.1.norm");
}

TEST_F(PythonArchiveTest, InputsOutputsAndRangesAreThoseOfTheModel) {
  const auto found = archive("model");
  const auto& program = found.programs.at("model");
  ASSERT_EQ(program.ranges.size(), 1);
  EXPECT_EQ(program.ranges.begin()->second.min, 2);
  EXPECT_EQ(program.ranges.begin()->second.max, 30);
  std::vector<std::string> user;
  for (const auto& spec : program.inputs) {
    if (const auto* input = std::get_if<UserInput>(&spec)) {
      user.push_back(std::get<TensorName>(input->argument.value).name);
      const auto& sizes = program.graph.tensors.at(user.back()).sizes;
      EXPECT_THAT(
          std::get<std::string>(sizes[0].value),
          HasSubstr("Symbol('" + program.ranges.begin()->first + "'"));
    } else if (const auto* written = std::get_if<WrittenInput>(&spec)) {
      user.push_back(written->name);
      if (written->name == "limits_0") {
        EXPECT_TRUE(std::isinf(std::get<double>(written->value)));
      }
    }
  }
  EXPECT_EQ(
      user, (std::vector<std::string>{"x", "mask", "limits_0", "limits_1"}));

  const auto& call = program.module_calls.at(0);
  EXPECT_EQ(
      call.input_names, (std::vector<std::string>{"x", "mask", "limits"}));
  const auto& outputs = *call.outputs;
  EXPECT_EQ(outputs.kind, TreeSpec::Kind::Dict);
  EXPECT_EQ(outputs.keys, (std::vector<std::string>{"logits", "rest"}));
  EXPECT_EQ(outputs.children[1].kind, TreeSpec::Kind::Tuple);
  EXPECT_EQ(outputs.children[1].children[1].kind, TreeSpec::Kind::List);
  EXPECT_EQ(outputs.num_leaves(), 5);
}

TEST_F(PythonArchiveTest, TreesHaveTheirTypesAndKeys) {
  const auto found = archive("trees");
  const auto& call = found.programs.at("model").module_calls.at(0);
  const auto& args = call.inputs->children.at(0);
  using Kind = TreeSpec::Kind;
  const auto expect = [](const TreeSpec& tree,
                         Kind kind,
                         const std::string& type,
                         const std::vector<std::string>& keys) {
    EXPECT_EQ(tree.kind, kind) << type;
    EXPECT_EQ(tree.type_name, type);
    EXPECT_EQ(tree.keys, keys) << type;
  };
  expect(args.children[0], Kind::NamedTuple, "tests.Pair", {"first", "second"});
  expect(args.children[1], Kind::Dict, "collections.OrderedDict", {"k"});
  expect(args.children[2], Kind::List, "builtins.list", {});
  expect(args.children[2].children[2], Kind::Dict, "builtins.dict", {"1"});
  expect(args.children[3], Kind::Dict, "collections.defaultdict", {"z"});
  expect(
      call.outputs->children[1],
      Kind::Other,
      "tests.Output",
      {"total", "rest"});
}

TEST_F(PythonArchiveTest, GraphsNestAndNumbersAreSymbolic) {
  const auto found = archive("branches");
  const auto& graph = found.programs.at("model").graph;
  const auto& cond = node_named(graph, "cond");
  EXPECT_EQ(cond.target, "torch.ops.higher_order.cond");
  std::vector<std::string> graphs;
  double factor = 0;
  for (const auto& input : cond.inputs) {
    if (const auto* nested = std::get_if<NestedGraph>(&input.argument.value)) {
      graphs.push_back(nested->name);
      for (const auto& node : nested->graph->nodes) {
        for (const auto& value : node.inputs) {
          if (const auto* number = std::get_if<double>(&value.argument.value)) {
            factor = *number;
          }
        }
      }
    }
  }
  EXPECT_EQ(graphs.size(), 2);
  EXPECT_TRUE(std::isnan(factor));
  EXPECT_FALSE(graph.ints.empty());
  EXPECT_FALSE(graph.floats.empty());
}

TEST(ArchiveTest, TheTinyArchiveIsRead) {
  const auto found = read(format::golden("tiny.pt2"));
  EXPECT_EQ(found.programs.at("model").graph.nodes.size(), 1);
  EXPECT_EQ(found.weights.size(), 2);
  EXPECT_TRUE(is_archive(format::as_bytes(format::golden("tiny.pt2"))));
  EXPECT_FALSE(is_archive(format::as_bytes(format::golden("weights.pt"))));
}

TEST(ArchiveTest, OtherVersionsAndKindsAreRefused) {
  EXPECT_EQ(
      refusal_of(tiny().set("archive_version", "1").bytes()),
      "archive_version is \"1\", and version \"0\" is read");
  EXPECT_EQ(
      refusal_of(tiny().remove("archive_version").bytes()),
      "the archive has no archive_version");
  EXPECT_EQ(
      refusal_of(tiny().set("archive_format", "pt3").bytes()),
      "archive_format is \"pt3\", not \"pt2\"");
  EXPECT_THAT(
      refusal_of(tiny().remove("archive_format").bytes()),
      HasSubstr("torch.export.save did not write it"));
  EXPECT_THAT(
      refusal_of(tiny()
                     .remove("archive_format")
                     .add("tiny/serialized_exported_program.json", "{}")
                     .bytes()),
      HasSubstr("before 2.8"));
  EXPECT_THAT(
      refusal_of(tiny().set("byteorder", "big").bytes()),
      HasSubstr("byteorder is \"big\""));
  EXPECT_THAT(
      refusal_of(tiny().remove(kModel).bytes()), HasSubstr("has no program"));
  EXPECT_THAT(
      refusal_of(tiny()
                     .remove(kModel)
                     .add("tiny/data/aotinductor/model/a.so", "")
                     .bytes()),
      HasSubstr("AOTInductor"));
  EXPECT_THAT(
      refusal_of(tiny().add("tiny/data/weights/model.pt", "").bytes()),
      HasSubstr("data/weights/model.pt is a pickle of an older torch"));
  EXPECT_THAT(
      refusal_of(tiny().add("other/file", "").bytes()),
      HasSubstr("\"other/file\" is not in the folder of the others"));
}

TEST(ArchiveTest, MissingFilesAreNamed) {
  EXPECT_EQ(
      refusal_of(tiny().remove("data/weights/weight_0").bytes()),
      "data/weights/model_weights_config.json: weight \"weight\" is in "
      "\"data/weights/weight_0\", which is not in the archive");
  EXPECT_EQ(
      refusal_of(tiny().remove(kWeights).bytes()),
      std::string("the archive has no ") + kWeights);
  EXPECT_EQ(
      refusal_of(
          tiny()
              .change(
                  kWeights, [](auto& json) { json["config"].erase("bias"); })
              .bytes()),
      "models/model.json: \"bias\" is needed, and no config in data/weights/ "
      "has it");
  EXPECT_EQ(refusal_of(tiny().remove(kConstants).bytes()), "accepted");
}

TEST(ArchiveTest, TensorsLieWithinTheirFiles) {
  const auto with_meta = [](const std::string& field, nlohmann::json value) {
    return tiny()
        .change(
            kWeights,
            [&](auto& json) {
              json["config"]["weight"]["tensor_meta"][field] = value;
            })
        .bytes();
  };
  const auto as_ints = [](const std::vector<int64_t>& values) {
    nlohmann::json all = nlohmann::json::array();
    for (const int64_t value : values) {
      all.push_back({{"as_int", value}});
    }
    return all;
  };
  const std::string outside =
      "weight \"weight\" reaches to byte 12 of \"weight_0\", which has 8";
  EXPECT_THAT(
      refusal_of(tiny().set("data/weights/weight_0", "1234567").bytes()),
      HasSubstr("reaches to byte 8 of \"weight_0\", which has 7"));
  EXPECT_THAT(
      refusal_of(with_meta("storage_offset", {{"as_int", 1}})),
      HasSubstr(outside));
  EXPECT_THAT(
      refusal_of(with_meta("strides", as_ints({2, 2}))), HasSubstr(outside));
  EXPECT_THAT(
      refusal_of(with_meta("dtype", 8)), HasSubstr("reaches to byte 16"));
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {INT64_MAX, 2},
           {INT64_MAX, 1},
           {int64_t{1} << 32, int64_t{1} << 32}}) {
    EXPECT_THAT(
        refusal_of(with_meta("sizes", as_ints(sizes))),
        HasSubstr("does not fit into 64 bits"));
  }
  for (const auto& strides : std::vector<std::vector<int64_t>>{
           {1, INT64_MAX}, {1, INT64_MAX - 1}, {1, INT64_MAX / 4}}) {
    EXPECT_THAT(
        refusal_of(with_meta("strides", as_ints(strides))),
        HasSubstr("does not fit into 64 bits"));
  }
  EXPECT_THAT(
      refusal_of(with_meta("storage_offset", {{"as_int", INT64_MAX}})),
      HasSubstr("does not fit into 64 bits"));
  EXPECT_THAT(
      refusal_of(with_meta("storage_offset", {{"as_int", -1}})),
      HasSubstr("has the storage offset -1"));
  EXPECT_THAT(
      refusal_of(with_meta("sizes", as_ints({-1, 2}))),
      HasSubstr("has the size -1"));
  EXPECT_THAT(
      refusal_of(with_meta(
          "strides",
          nlohmann::json::parse(
              R"([{"as_expr": {"expr_str": "s0"}}, {"as_int": 1}])"))),
      AllOf(
          HasSubstr("config.weight.tensor_meta"),
          HasSubstr("has the stride \"s0\"")));
  EXPECT_THAT(
      refusal_of(with_meta("sizes", as_ints({1}))),
      HasSubstr("has 1 sizes and 2 strides"));
  EXPECT_THAT(
      refusal_of(with_meta("sizes", as_ints({1, 1}))),
      HasSubstr(
          "\"weight\" has other sizes in the graph than in data/weights/"));
  EXPECT_THAT(refusal_of(with_meta("layout", 1)), HasSubstr("is not strided"));
}

TEST(ArchiveTest, PicklesAreRefusedByName) {
  const auto pickled = [](nlohmann::json meta) {
    return tiny()
        .change(
            kWeights,
            [&](auto& json) {
              json["config"]["bias"]["use_pickle"] = true;
              if (meta.is_null()) {
                json["config"]["bias"]["tensor_meta"] = nullptr;
              }
            })
        .bytes();
  };
  EXPECT_THAT(
      refusal_of(pickled({})),
      HasSubstr(
          "config.bias is an object that is no tensor, which is pickled"));
  EXPECT_THAT(
      refusal_of(pickled(true)),
      HasSubstr("config.bias is a tensor of a class of its own"));
  EXPECT_THROW(read(pickled(true)), format::UnsupportedFormat);
}

TEST(ArchiveTest, ProgramsWithOtherWeightsOfTheSameNameAreRefused) {
  auto archive = tiny();
  archive.add("tiny/models/eval.json", archive.at(kModel));
  auto config = nlohmann::json::parse(archive.at(kWeights));
  archive.add("tiny/data/weights/eval_weights_config.json", config.dump());
  EXPECT_EQ(refusal_of(archive.bytes()), "accepted");
  archive.add("tiny/data/weights/weight_2", "12345678");
  config["config"]["weight"]["path_name"] = "weight_2";
  archive.set("data/weights/eval_weights_config.json", config.dump());
  EXPECT_THAT(
      refusal_of(archive.bytes()),
      AllOf(
          HasSubstr("eval_weights_config.json: weight \"weight\" is another"),
          HasSubstr("tessera_export.py")));
}

TEST(ArchiveTest, NamesThatRepeatAreRefused) {
  auto archive = tiny();
  auto& config = archive.at(kWeights);
  config.replace(config.find("\"bias\""), 6, "\"weight\"");
  EXPECT_THAT(
      refusal_of(archive.bytes()),
      HasSubstr("model_weights_config.json: byte 0: \"weight\" appears twice"));
  auto doubled = tiny();
  EXPECT_THAT(
      refusal_of(doubled.add("tiny/archive_format", "pt2").bytes()),
      HasSubstr("appears twice"));
}

TEST(ArchiveTest, HugeTextsAreRefusedBeforeTheyAreRead) {
  EXPECT_THAT(
      refusal_of(tiny().set("archive_version", std::string(65, '0')).bytes()),
      HasSubstr("archive_version has 65 bytes, at most 64 are read"));
}

} // namespace
} // namespace tessera::exported
