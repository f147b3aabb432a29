#include "checkpoint/format/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/zip_archive.h"

namespace tessera::format {
namespace {

using std::string_literals::operator""s;
using testing::ElementsAre;
using testing::HasSubstr;

const Tensor& as_tensor(const Value* value) {
  return **value->get<Box<Tensor>>();
}

Tensor vector_of(int64_t numel) {
  Tensor tensor;
  tensor.storage = {"0", DType::Float32, "cpu", numel};
  tensor.sizes = {numel};
  tensor.strides = {1};
  return tensor;
}

// A torch file of a tensor whose storage has three floats.
ZipArchive file_of(const Value& value) {
  return {
      .entries = {
          {.name = "t/data.pkl", .data = write_pickle(value)},
          {.name = "t/byteorder", .data = "little"},
          {.name = "t/data/0", .data = std::string(12, 'x')},
          {.name = "t/version", .data = "3\n"}}};
}

std::string refused(const ZipArchive& archive) {
  const auto bytes = archive.bytes();
  return refusal([&] { read_torch_file(as_bytes(bytes)); });
}

TEST(TorchFileTest, ReadsEveryKindOfValue) {
  const auto bytes = golden("kinds.pt");
  const auto file = read_torch_file(as_bytes(bytes));
  const auto& dict = *file.value.get<Dict>();
  EXPECT_EQ(*dict.find("none"), Value(None{}));
  EXPECT_EQ(*dict.find("bools"), Value(List{{true, false}}));
  EXPECT_EQ(
      *dict.find("ints"),
      Value(List{
          {0,
           255,
           256,
           65535,
           65536,
           -1,
           int64_t{1} << 31,
           INT64_MIN,
           INT64_MAX}}));
  EXPECT_EQ(*dict.find("float"), Value(0.1));
  EXPECT_EQ(*dict.find("text"), Value("grün"));
  EXPECT_EQ(*dict.find("bytes"), Value(Bytes{"ab\xff\0"s}));
  EXPECT_EQ(*dict.find("no_bytes"), Value(Bytes{}));
  EXPECT_EQ(*dict.find("bytearray"), Value(Bytes{"x"}));
  EXPECT_EQ(*dict.find("complex"), Value(Complex{1, 2}));
  EXPECT_EQ(*dict.find("tuple"), Value(Tuple{{1, Tuple{{2, 3}}, Tuple{}}}));
  EXPECT_EQ(*dict.find("set"), Value(Set{{7}}));
  EXPECT_EQ(*dict.find("counter"), Value(Dict{{{3, 1}}}));
  EXPECT_EQ(*dict.find("size"), Value(Size{{2, 3}}));
  EXPECT_EQ(*dict.find("dtype"), Value(DType::Float16));
  EXPECT_EQ(*dict.find("device"), Value(Device{"cpu"}));
  EXPECT_EQ(dict.items.back().key, Value(5));
}

TEST(TorchFileTest, ReadsEveryKindOfTensor) {
  const auto bytes = golden("kinds.pt");
  const auto file = read_torch_file(as_bytes(bytes));
  const auto& dict = *file.value.get<Dict>();
  EXPECT_TRUE(as_tensor(dict.find("parameter")).is_parameter);
  EXPECT_TRUE(as_tensor(dict.find("parameter")).requires_grad);
  EXPECT_EQ(as_tensor(dict.find("uint16")).dtype, DType::UInt16);
  EXPECT_EQ(as_tensor(dict.find("float8")).dtype, DType::Float8E4M3FN);
  EXPECT_TRUE(as_tensor(dict.find("conj")).conj);
  const auto& view = as_tensor(dict.find("view"));
  EXPECT_EQ(view.offset, 6);
  EXPECT_THAT(view.sizes, ElementsAre(2, 2));
  EXPECT_THAT(view.strides, ElementsAre(4, 1));
  EXPECT_EQ(
      load_le<float>(
          as_bytes(bytes), file.storages.at(view.storage.key).offset + 24),
      6);
  EXPECT_THAT(as_tensor(dict.find("transposed")).strides, ElementsAre(1, 3));
}

TEST(TorchFileTest, KeepsTiedWeightsTied) {
  const auto bytes = golden("weights.pt");
  const auto file = read_torch_file(as_bytes(bytes));
  const auto& dict = *file.value.get<Dict>();
  EXPECT_EQ(*dict.find("tied"), *dict.find("weight"));
  EXPECT_EQ(file.storages.size(), 2u);
}

TEST(TorchFileTest, ReadsAnOptimizer) {
  const auto bytes = golden("optim.pt");
  const auto file = read_torch_file(as_bytes(bytes));
  const auto& dict = *file.value.get<Dict>();
  const auto& state = *dict.find("state")->get<Dict>();
  EXPECT_EQ(state.items[1].key, Value(1));
  const auto& groups = dict.find("param_groups")->get<List>()->items;
  EXPECT_EQ(*groups[0].get<Dict>()->find("betas"), Value(Tuple{{0.9, 0.999}}));
}

TEST(TorchFileTest, RejectsTensorsOutsideOfTheirStorage) {
  EXPECT_EQ(refused(file_of(vector_of(3))), "accepted");
  const auto changed = [](const std::function<void(Tensor&)>& change) {
    auto tensor = vector_of(3);
    change(tensor);
    return refused(file_of(List{{tensor}}));
  };
  using T = Tensor;
  EXPECT_THAT(
      changed([](T& t) { t.offset = 1; }),
      HasSubstr("storage \"0\" reaches beyond its 3 elements"));
  EXPECT_THAT(
      changed([](T& t) { t.strides = {2}; }), HasSubstr("reaches beyond"));
  EXPECT_THAT(
      changed([](T& t) { t.strides = {-1}; }), HasSubstr("reaches beyond"));
  EXPECT_THAT(
      changed([](T& t) { t.strides = {INT64_MAX}; }),
      HasSubstr("reaches beyond"));
  EXPECT_THAT(
      changed([](T& t) { t.offset = INT64_MAX; }), HasSubstr("reaches beyond"));
  EXPECT_THAT(
      changed([](T& t) { t.offset = -1; }), HasSubstr("impossible shape"));
  EXPECT_THAT(
      changed([](T& t) { t.sizes = {-1}; }), HasSubstr("impossible shape"));
  EXPECT_THAT(
      changed([](T& t) { t.strides = {}; }), HasSubstr("impossible shape"));
  EXPECT_THAT(
      changed([](T& t) {
        t.sizes = {int64_t{1} << 50};
        t.strides = {0};
      }),
      HasSubstr("repeats elements"));
  EXPECT_THAT(
      changed([](T& t) { t.storage.numel = 4; }),
      HasSubstr("has 12 bytes, 4 elements are promised"));
  EXPECT_THAT(
      changed([](T& t) { t.storage.numel = INT64_MAX; }),
      HasSubstr("elements are promised"));
  EXPECT_THAT(
      changed([](T& t) { t.storage.key = "7"; }),
      HasSubstr("storage \"7\" is not in the archive"));
  EXPECT_EQ(
      changed([](T& t) {
        t.sizes = {0};
        t.offset = 100;
      }),
      "accepted");
}

TEST(TorchFileTest, RejectsWhatIsNoTorchFile) {
  auto archive = file_of(None{});
  archive.entries[1].data = "big";
  EXPECT_THAT(refused(archive), HasSubstr("byte order \"big\""));
  archive = file_of(None{});
  archive.entries[3].data = "11\n";
  EXPECT_THAT(refused(archive), HasSubstr("version \"11\\x0a\""));
  archive = file_of(None{});
  archive.entries.pop_back();
  EXPECT_THAT(refused(archive), HasSubstr("no version"));
  archive = file_of(None{});
  archive.entries[0] = {.name = "t/other.pkl"};
  EXPECT_THAT(refused(archive), HasSubstr("no data.pkl"));
  archive = file_of(None{});
  archive.entries.push_back({.name = "t/constants.pkl"});
  EXPECT_THAT(refused(archive), HasSubstr("TorchScript"));
  archive = file_of(None{});
  archive.entries[0].data = "\x80\x02i.";
  EXPECT_THAT(refused(archive), HasSubstr("in data.pkl, byte 2: opcode INST"));
  EXPECT_THAT(refused({}), HasSubstr("the archive is empty"));
  EXPECT_THAT(
      refusal([] { read_torch_file(as_bytes("\x80\x02\x8a\x0al")); }),
      HasSubstr("format before 1.6"));
}

} // namespace
} // namespace tessera::format
