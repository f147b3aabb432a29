#include "checkpoint/format/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "checkpoint/format/memory_peak.h"
#include "checkpoint/format/safetensors_index.h"
#include "checkpoint/format/support.h"

namespace tessera::format {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string file_of(const std::string& header, size_t data_bytes = 0) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header +
      std::string(data_bytes, 'x');
}

std::string refused(const std::string& header, size_t data_bytes = 0) {
  const auto bytes = file_of(header, data_bytes);
  return refusal([&] { read_safetensors(as_bytes(bytes)); });
}

std::string tensor(const std::string& fields) {
  return R"({"w":{)" + fields + "}}";
}

TEST(SafetensorsTest, ReadsAFileOfPython) {
  const auto bytes = golden("kinds.safetensors");
  const auto header = read_safetensors(as_bytes(bytes));
  EXPECT_EQ(header.metadata.at("format"), "pt");
  ASSERT_EQ(header.tensors.size(), 6u);
  EXPECT_EQ(header.data_offset % 8, 0u);
  for (const auto& tensor : header.tensors) {
    if (tensor.name == "w") {
      EXPECT_EQ(tensor.dtype, DType::Float32);
      EXPECT_THAT(tensor.sizes, ElementsAre(2, 3));
      EXPECT_EQ(
          load_le<float>(
              as_bytes(bytes), header.data_offset + tensor.begin + 20),
          5.0f);
    } else if (tensor.name == "e") {
      EXPECT_THAT(tensor.sizes, ElementsAre(0, 4));
    } else if (tensor.name == "s") {
      EXPECT_TRUE(tensor.sizes.empty());
    }
  }
}

TEST(SafetensorsTest, LaysOutAlignedTensorsThatReadBack) {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"ü", "\"\n"}};
  header.tensors = {
      {.name = "flag", .dtype = DType::Bool, .sizes = {3}},
      {.name = "b", .dtype = DType::Float64, .sizes = {2, 2}},
      {.name = "half", .dtype = DType::Float16, .sizes = {5}},
      {.name = "a", .dtype = DType::Float64, .sizes = {}},
      {.name = "none", .dtype = DType::Float32, .sizes = {0, 7}}};
  auto bytes = lay_out_safetensors(&header);
  EXPECT_EQ(header.data_offset, bytes.size());
  EXPECT_EQ(bytes.size() % 8, 0u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].begin, 8u);
  for (const auto& tensor : header.tensors) {
    EXPECT_EQ(tensor.begin % element_bytes(tensor.dtype), 0u) << tensor.name;
  }
  bytes.append(header.tensors.back().end, 'x');
  const auto again = read_safetensors(as_bytes(bytes));
  EXPECT_EQ(again.tensors, header.tensors);
  EXPECT_EQ(again.metadata, header.metadata);
  EXPECT_EQ(again.data_offset, header.data_offset);
}

TEST(SafetensorsTest, AcceptsNoTensors) {
  EXPECT_EQ(refused("{}"), "accepted");
  EXPECT_EQ(refused("{}   "), "accepted");
}

TEST(SafetensorsTest, RejectsBadLengths) {
  EXPECT_THAT(
      refusal([] { read_safetensors(as_bytes("short")); }),
      HasSubstr("ends inside the length"));
  EXPECT_THAT(
      refusal([] {
        read_safetensors(as_bytes("\xff\xff\xff\xff\xff\xff\xff\xff{}"));
      }),
      HasSubstr("a header of 18446744073709551615 bytes, in a file of 10"));
  EXPECT_THAT(
      refusal([] {
        read_safetensors(as_bytes(std::string("\x03\0\0\0\0\0\0\0{}", 10)));
      }),
      HasSubstr("a header of 3 bytes"));
}

TEST(SafetensorsTest, RejectsWhatIsNoHeader) {
  EXPECT_THAT(refused(""), HasSubstr("does not begin with {"));
  EXPECT_THAT(refused(" {}"), HasSubstr("does not begin with {"));
  EXPECT_THAT(refused("{"), AllOf(HasSubstr("byte"), HasSubstr("not JSON")));
  EXPECT_THAT(refused("{} x"), HasSubstr("not JSON"));
  EXPECT_THAT(refused("{\"\xff\":1}"), HasSubstr("not JSON"));
  EXPECT_THAT(refused(R"({"a":1e999})"), HasSubstr("too large"));
  EXPECT_THAT(
      refused(R"({"w":{"shape":[[1]]}})"), HasSubstr("nests too deeply"));
  EXPECT_THAT(
      refused("{\"w\":" + std::string(100000, '[')),
      HasSubstr("not described"));
  EXPECT_THAT(
      refused(R"({"__metadata__":{},"__metadata__":{}})"),
      HasSubstr("\"__metadata__\" appears twice"));
  EXPECT_THAT(
      refused(R"({"__metadata__":[]})"),
      HasSubstr("__metadata__ is not an object"));
  EXPECT_THAT(
      refused(R"({"__metadata__":{"a":1}})"),
      HasSubstr("__metadata__.\"a\" is not a string"));
}

TEST(SafetensorsTest, RejectsBadTensors) {
  const std::string rest = R"(,"shape":[2],"data_offsets":[0,8])";
  EXPECT_EQ(refused(tensor(R"("dtype":"F32")" + rest), 8), "accepted");
  EXPECT_THAT(refused(tensor(R"("dtype":"F4")" + rest), 8), HasSubstr("F4"));
  EXPECT_THAT(refused(tensor(R"("dtype":1)" + rest), 8), HasSubstr("dtype"));
  EXPECT_THAT(
      refused(R"({"w":[]})"), HasSubstr("tensor \"w\" is not described"));
  EXPECT_THAT(
      refused(tensor(R"("dtype":"F32","more":1)" + rest), 8),
      AllOf(HasSubstr("\"more\""), HasSubstr("described by three fields")));
  EXPECT_THAT(
      refused(tensor(R"("dtype":"F32","shape":[2],"offsets":[0,8])"), 8),
      HasSubstr("tensor \"w\" has a field \"offsets\""));
  EXPECT_THAT(
      refused(tensor(R"("dtype":"F32","shape":[2])"), 8),
      HasSubstr("tensor \"w\" has no data_offsets"));
  EXPECT_THAT(
      refused(tensor(R"("dtype":"F32","dtype":"F32")" + rest), 8),
      HasSubstr("\"dtype\" appears twice"));
  const auto with = [](const std::string& shape, const std::string& places) {
    return refused(
        tensor(
            R"("dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" +
            places),
        8);
  };
  EXPECT_THAT(with("[-2]", "[0,8]"), HasSubstr("shape is not a list of sizes"));
  EXPECT_THAT(
      with("[2.0]", "[0,8]"), HasSubstr("shape is not a list of sizes"));
  EXPECT_THAT(with("2", "[0,8]"), HasSubstr("shape is not a list of sizes"));
  EXPECT_THAT(
      with("[18446744073709551615]", "[0,8]"),
      HasSubstr("not a list of sizes"));
  EXPECT_THAT(with("[2]", "[8]"), HasSubstr("data_offsets are not a range"));
  EXPECT_THAT(with("[2]", "[8,0]"), HasSubstr("data_offsets are not a range"));
  EXPECT_THAT(with("[3]", "[0,8]"), HasSubstr("has 8 bytes, but its shape"));
  EXPECT_THAT(with("[4611686018427387904,4]", "[0,0]"), HasSubstr("its shape"));
  EXPECT_THAT(with("[2]", "[4,12]"), HasSubstr("begins at 4, not at 0"));
  EXPECT_THAT(with("[1]", "[0,4]"), HasSubstr("have 4 bytes, the file 8"));
  EXPECT_THAT(with("[4]", "[0,16]"), HasSubstr("have 16 bytes, the file 8"));
}

TEST(SafetensorsTest, RejectsTwoOfAName) {
  const std::string w =
      R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_EQ(refused("{" + w + "}"), "accepted");
  EXPECT_THAT(
      refused("{" + w + "," + w + "}"), HasSubstr("\"w\" appears twice"));
  EXPECT_THAT(
      refused(R"({"__metadata__":{"a":"","a":""}})"),
      HasSubstr("\"a\" appears twice"));
}

// Much content that costs memory and has no meaning.
TEST(SafetensorsTest, AHostileHeaderPeaksBelowAMultipleOfItself) {
  using Item = std::function<std::string(size_t)>;
  const Item one = [](size_t) {
    std::string text;
    for (int i = 0; i < 1000; ++i) {
      text += ",1";
    }
    return text;
  };
  const Item named = [](size_t i) {
    return ",\"" + std::to_string(i) + "\":1";
  };
  const Item tensor = [](size_t i) {
    return ",\"" + std::to_string(i) +
        R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  };
  struct Hostile {
    std::string begin;
    Item item;
    std::string end;
    size_t factor; // of its bytes
  };
  for (const Hostile& hostile : std::vector<Hostile>{
           {R"({"w":{"dtype":"F32","shape":[1)", one, "]}}", 3},
           {R"({"w":[1)", one, "]}", 3},
           {R"({"-":1)", named, "}", 3},
           {R"({"w":{"-":1)", named, "}}", 3},
           {R"({"a)",
            [](size_t) { return std::string(1000, 'a'); },
            R"(":1})",
            5},
           {R"({"__metadata__":{})", tensor, "}", 6}}) { // these are tensors
    SCOPED_TRACE(hostile.begin);
    std::string header = hostile.begin;
    for (size_t i = 0; header.size() < 83'000'000; ++i) {
      header += hostile.item(i);
    }
    const auto bytes = file_of(header + hostile.end);
    EXPECT_LE(
        peak_bytes_of(
            [&] { refusal([&] { read_safetensors(as_bytes(bytes)); }); }),
        hostile.factor * bytes.size());
  }
}

TEST(SafetensorsTest, RejectsOverlap) {
  EXPECT_THAT(
      refused(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
          R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
          6),
      HasSubstr("overlaps"));
}

TEST(SafetensorsTest, RejectsWhatCannotBeWritten) {
  const auto refused_write = [](std::vector<SafeTensor> tensors) {
    SafetensorsHeader header;
    header.tensors = std::move(tensors);
    return refusal([&] { lay_out_safetensors(&header); });
  };
  const SafeTensor w{.name = "w", .sizes = {1}};
  EXPECT_THAT(refused_write({w, w}), HasSubstr("\"w\" appears twice"));
  EXPECT_THAT(
      refused_write({{.name = "w", .dtype = DType::Complex128}}),
      HasSubstr("safetensors has no complex128"));
  EXPECT_THAT(
      refused_write({{.name = "__metadata__"}}), HasSubstr("cannot be named"));
  EXPECT_THAT(refused_write({{.name = "\xff"}}), HasSubstr("cannot be named"));
  EXPECT_THAT(
      refused_write({{.name = "w", .sizes = {INT64_MAX}}}),
      HasSubstr("too large"));
}

TEST(SafetensorsIndexTest, ReadsAndWrites) {
  const auto index =
      read_safetensors_index(golden("model.safetensors.index.json"));
  EXPECT_EQ(index.files.size(), 6u);
  EXPECT_EQ(index.files.at("w"), "kinds.safetensors");
  EXPECT_EQ(index.total_bytes, 59u);
  EXPECT_EQ(read_safetensors_index(write_safetensors_index(index)), index);
  EXPECT_EQ(
      read_safetensors_index(write_safetensors_index({})), SafetensorsIndex{});
}

TEST(SafetensorsIndexTest, RejectsFilesElsewhere) {
  const auto refused_index = [](const std::string& text) {
    return refusal([&] { read_safetensors_index(text); });
  };
  EXPECT_THAT(
      refused_index(R"({"weight_map":{"w":"../x"}})"),
      AllOf(HasSubstr("\"../x\""), HasSubstr("leaves its folder")));
  EXPECT_THAT(
      refused_index(R"({"weight_map":{"w":"/x"}})"), HasSubstr("is absolute"));
  EXPECT_THAT(
      refused_index(R"({"weight_map":{"w":1}})"), HasSubstr("is not a string"));
  EXPECT_THAT(refused_index("{}"), HasSubstr("no weight_map"));
  EXPECT_THAT(refused_index("[]"), HasSubstr("no weight_map"));
  EXPECT_THAT(refused_index("x"), HasSubstr("not JSON"));
}

} // namespace
} // namespace tessera::format
