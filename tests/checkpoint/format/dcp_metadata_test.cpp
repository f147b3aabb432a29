#include "checkpoint/format/dcp_metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "checkpoint/format/pickle_reader.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::format {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

DcpMetadata read(const std::string& name) {
  return read_dcp_metadata(as_bytes(golden(name)));
}

const DcpTensor& tensor(const DcpMetadata& metadata, const std::string& name) {
  const auto found = std::find_if(
      metadata.tensors.begin(), metadata.tensors.end(), [&](const auto& t) {
        return t.name == name;
      });
  if (found == metadata.tensors.end()) {
    throw std::runtime_error("no tensor " + name);
  }
  return *found;
}

DcpMetadata example() {
  DcpMetadata metadata;
  DcpTensor w;
  w.name = "model.w";
  w.dtype = DType::BFloat16;
  w.sizes = {4, 3};
  w.chunks = {
      {.offsets = {0, 0},
       .sizes = {3, 3},
       .storage = DcpStorage{"__0_0.distcp", 0, 1500, {}}},
      {.offsets = {3, 0},
       .sizes = {1, 3},
       .storage = DcpStorage{"__1_0.distcp", 7, int64_t{1} << 40, {"zstd"}}},
      {.offsets = {4, 0}, .sizes = {0, 3}, .storage = std::nullopt}};
  w.memory_format = MemoryFormat::Preserve;
  w.requires_grad = true;
  metadata.tensors = {w};
  metadata.bytes = {{.name = "l.0", .storage = {"__0_0.distcp", 1500, 10, {}}}};
  metadata.paths = {
      {.name = "model.w", .keys = {"model", "w"}},
      {.name = "l.0", .keys = {"l", int64_t{0}}}};
  metadata.storage_meta = DcpStorageMeta{
      .checkpoint_id = "folder",
      .save_id = "id",
      .load_id = std::nullopt,
      .modules = {"m"}};
  metadata.version = "1.0.0";
  return metadata;
}

TEST(DcpMetadataTest, ReadsAPlainCheckpointOfTorch) {
  const auto metadata = read("plain/.metadata");
  EXPECT_EQ(metadata.version, "1.0.0");
  EXPECT_EQ(metadata.storage_meta->checkpoint_id, "plain");
  EXPECT_EQ(metadata.tensors.size(), 5u);
  const auto& w = tensor(metadata, "model.w");
  EXPECT_EQ(w.dtype, DType::Float32);
  EXPECT_THAT(w.sizes, ElementsAre(2, 3));
  ASSERT_EQ(w.chunks.size(), 1u);
  EXPECT_THAT(w.chunks[0].offsets, ElementsAre(0, 0));
  EXPECT_EQ(w.chunks[0].storage->file, "__0_0.distcp");
  EXPECT_EQ(tensor(metadata, "model.b").dtype, DType::BFloat16);
  EXPECT_THAT(tensor(metadata, "empty").sizes, ElementsAre(0, 3));
  EXPECT_TRUE(tensor(metadata, "optim.state.0.step").sizes.empty());
  EXPECT_EQ(tensor(metadata, "odd name, ünïcode").dtype, DType::Bool);
  ASSERT_EQ(metadata.bytes.size(), 3u);
  EXPECT_EQ(metadata.bytes[0].name, "optim.param_groups.0.lr");
  const DcpPath lr{
      .name = "optim.param_groups.0.lr",
      .keys = {"optim", "param_groups", int64_t{0}, "lr"}};
  EXPECT_THAT(*metadata.paths, testing::Contains(lr));
}

TEST(DcpMetadataTest, PlacesItemsThatAreTorchFiles) {
  const auto metadata = read("plain/.metadata");
  const auto data = golden("plain/__0_0.distcp");
  const auto item = [&](const DcpStorage& storage) {
    return read_torch_file(
        as_bytes(data).subspan(storage.offset, storage.length));
  };
  const auto& chunk = tensor(metadata, "model.w").chunks[0];
  const auto file = item(*chunk.storage);
  const auto& w = **file.value.get<Box<Tensor>>();
  EXPECT_EQ(w.sizes, chunk.sizes);
  const auto& storage = file.storages.at(w.storage.key);
  ASSERT_EQ(storage.bytes, 24u);
  EXPECT_EQ(
      load_le<float>(
          as_bytes(data), chunk.storage->offset + storage.offset + 20),
      5.0f);
  EXPECT_EQ(item(metadata.bytes[0].storage).value, Value(0.1));
}

TEST(DcpMetadataTest, ReadsTheShardsOfTwoRanks) {
  const auto metadata = read("fsdp2.metadata");
  const auto& wide = tensor(metadata, "optim.state.wide.weight.exp_avg");
  EXPECT_THAT(wide.sizes, ElementsAre(5, 3));
  ASSERT_EQ(wide.chunks.size(), 2u);
  EXPECT_THAT(wide.chunks[0].sizes, ElementsAre(3, 3));
  EXPECT_THAT(wide.chunks[1].offsets, ElementsAre(3, 0));
  EXPECT_EQ(wide.chunks[1].storage->file, "__1_0.distcp");
  const auto& row = tensor(metadata, "model.row.weight");
  EXPECT_THAT(row.chunks[0].sizes, ElementsAre(1, 2));
}

TEST(DcpMetadataTest, ReadsTheModulesOfOldTorch) {
  auto now = read("fsdp2.metadata");
  now.storage_meta.reset();
  now.version.reset();
  EXPECT_EQ(read("old.metadata"), now);
}

TEST(DcpMetadataTest, ReadsWhatWasSavedFlat) {
  const auto metadata = read("flat.metadata");
  EXPECT_FALSE(metadata.paths);
  EXPECT_EQ(metadata.tensors.size(), 1u);
}

TEST(DcpMetadataTest, RoundTrips) {
  const auto metadata = example();
  EXPECT_EQ(
      read_dcp_metadata(as_bytes(write_dcp_metadata(metadata))), metadata);
  EXPECT_EQ(read_dcp_metadata(as_bytes(write_dcp_metadata({}))), DcpMetadata{});
  for (const char* name :
       {"plain/.metadata", "flat.metadata", "fsdp2.metadata", "old.metadata"}) {
    const auto theirs = read(name);
    EXPECT_EQ(read_dcp_metadata(as_bytes(write_dcp_metadata(theirs))), theirs)
        << name;
  }
}

TEST(DcpMetadataTest, RejectsWhatCannotBe) {
  const auto refused = [](const std::function<void(DcpMetadata&)>& change) {
    auto metadata = example();
    change(metadata);
    const auto bytes = write_dcp_metadata(metadata);
    return refusal([&] { read_dcp_metadata(as_bytes(bytes)); });
  };
  using M = DcpMetadata;
  const auto& first = [](M& m) -> DcpChunk& { return m.tensors[0].chunks[0]; };
  EXPECT_EQ(refused([](M&) {}), "accepted");
  for (const auto& [path, why] :
       {std::pair("/etc/passwd", "is absolute"),
        std::pair("../x", "leaves its folder"),
        std::pair("a/../../x", "leaves its folder"),
        std::pair("", "is empty"),
        std::pair("a//b", "simplest form"),
        std::pair("a/", "ends with a slash")}) {
    EXPECT_THAT(
        refused([&](M& m) { first(m).storage->file = path; }), HasSubstr(why));
  }
  EXPECT_THAT(
      refused([&](M& m) { first(m).storage->file = std::string("a\0b", 3); }),
      HasSubstr("zero byte"));
  EXPECT_THAT(
      refused([&](M& m) { first(m).storage->offset = -1; }),
      HasSubstr("storage of \"model.w\": offset is -1"));
  EXPECT_THAT(
      refused([&](M& m) { first(m).storage->offset = INT64_MAX; }),
      HasSubstr("too large"));
  EXPECT_THAT(
      refused([&](M& m) { first(m).storage->length = -5; }),
      HasSubstr("length is -5"));
  EXPECT_THAT(
      refused([&](M& m) { first(m).storage.reset(); }),
      HasSubstr("tensor \"model.w\" has a chunk that storage_data does not"));
  EXPECT_THAT(
      refused([&](M& m) {
        first(m).sizes = {5, 3};
      }),
      HasSubstr("outside the tensor"));
  EXPECT_THAT(
      refused([&](M& m) {
        first(m).offsets = {-1, 0};
      }),
      HasSubstr("outside the tensor"));
  EXPECT_THAT(
      refused([&](M& m) {
        first(m).sizes = {3, -3};
      }),
      HasSubstr("impossible shape"));
  EXPECT_THAT(
      refused([&](M& m) { first(m).sizes = {3}; }),
      HasSubstr("impossible shape"));
  EXPECT_THAT(
      refused([](M& m) {
        m.tensors[0].sizes = {INT64_MAX, 3};
      }),
      HasSubstr("impossible size"));
  EXPECT_THAT(
      refused([](M& m) { m.tensors.push_back(m.tensors[0]); }),
      HasSubstr("\"model.w\" appears twice"));
  EXPECT_THAT(
      refused([](M& m) { m.version = "2.0.0"; }), HasSubstr("\"2.0.0\""));
}

// Changes the tree of a good .metadata, and returns how that is refused.
std::string refused_tree(const std::function<void(Dict&)>& change) {
  Value root = read_pickle(as_bytes(write_dcp_metadata(example())));
  change(std::get<Dict>(std::get<Box<Object>>(root.is)->state.is));
  const auto bytes = write_pickle(root);
  return refusal([&] { read_dcp_metadata(as_bytes(bytes)); });
}

Value& field(Dict& dict, const std::string& name) {
  return *const_cast<Value*>(dict.find(name));
}

TEST(DcpMetadataTest, RejectsFieldsOfAnotherKind) {
  EXPECT_THAT(
      refusal([] { read_dcp_metadata(as_bytes("\x80\x02N.")); }),
      HasSubstr("the metadata is None"));
  EXPECT_THAT(
      refused_tree([](Dict& d) { field(d, "storage_data") = 3; }),
      HasSubstr("storage_data is an int"));
  EXPECT_THAT(
      refused_tree([](Dict& d) { d.items.erase(d.items.begin()); }),
      HasSubstr("no field \"state_dict_metadata\""));
  EXPECT_THAT(
      refused_tree([](Dict& d) { d.add("surprise", 1); }),
      HasSubstr("\"surprise\", which is not supported"));
  EXPECT_THAT(
      refused_tree([](Dict& d) { field(d, "planner_data") = List{}; }),
      HasSubstr("another planner"));
  EXPECT_THAT(
      refused_tree([](Dict& d) {
        field(d, "storage_meta") = Object{Class::Metadata, Dict{}};
      }),
      HasSubstr("storage_meta is a Metadata, not a StorageMeta"));
  EXPECT_THAT(
      refused_tree([](Dict& d) {
        std::get<Dict>(field(d, "state_dict_metadata").is).items.pop_back();
      }),
      HasSubstr("storage_data places \"l.0\", which does not exist"));
  EXPECT_THAT(
      refused_tree([](Dict& d) {
        std::get<Dict>(field(d, "storage_data").is).items.pop_back();
      }),
      HasSubstr("value \"l.0\" is not placed"));
  EXPECT_THAT(
      refused_tree([](Dict& d) {
        auto& entries = std::get<Dict>(field(d, "state_dict_metadata").is);
        auto& w = std::get<Box<Object>>(entries.items[0].value.is);
        field(std::get<Dict>(w->state.is), "properties") =
            Object{Class::TensorProperties, Tuple{{1, 2}}};
      }),
      HasSubstr("tensor \"model.w\": properties are not"));
}

} // namespace
} // namespace tessera::format
