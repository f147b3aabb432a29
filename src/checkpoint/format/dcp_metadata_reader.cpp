#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/object_fields.h"
#include "checkpoint/format/path.h"
#include "checkpoint/format/pickle_reader.h"

namespace tessera::format {
namespace {

// What a MetadataIndex compares: the name and the chunk's offsets for tensors,
// the name alone for other values.
struct StorageKey {
  std::string_view name;
  std::optional<std::vector<int64_t>> offsets;

  auto operator<=>(const StorageKey&) const = default;
};

using StorageMap = std::map<StorageKey, DcpStorage>;

int64_t expect_not_negative(const Fields& fields, std::string_view name) {
  const auto value = fields.get<int64_t>(name);
  if (value < 0) {
    throw FormatError(fields.what(name) + " is " + std::to_string(value));
  }
  return value;
}

DcpStorage read_storage(const Value& value, std::string_view name) {
  const Fields fields(
      value,
      Class::StorageInfo,
      "storage of " + in_quotes(name),
      {"relative_path", "offset", "length", "transform_descriptors"});
  DcpStorage storage;
  storage.file = fields.get<std::string>("relative_path");
  if (const auto why = why_it_leaves(storage.file); !why.empty()) {
    throw FormatError(
        fields.what("relative_path") + " " + in_quotes(storage.file) + " " +
        std::string(why));
  }
  storage.offset = expect_not_negative(fields, "offset");
  storage.length = expect_not_negative(fields, "length");
  if (storage.offset > INT64_MAX - storage.length) {
    throw FormatError(fields.what("offset") + " is too large");
  }
  const auto* transforms = fields.find("transform_descriptors");
  if (transforms && !transforms->get<None>()) {
    storage.transforms =
        expect_strings(*transforms, fields.what("transform_descriptors"));
  }
  return storage;
}

StorageMap read_storages(const Value& value) {
  StorageMap storages;
  for (const auto& [key, info] : expect<Dict>(value, "storage_data").items) {
    const Fields index(
        key,
        Class::MetadataIndex,
        "a key of storage_data",
        {"fqn", "offset", "index"});
    StorageKey found{.name = index.get<std::string>("fqn"), .offsets = {}};
    const auto* offset = index.find("offset");
    if (offset && !offset->get<None>()) {
      found.offsets = expect<Size>(*offset, index.what("offset")).dims;
    }
    const auto name = found.name;
    storages.insert_or_assign(std::move(found), read_storage(info, name));
  }
  return storages;
}

void read_properties(
    const Value& value,
    const std::string& where,
    DcpTensor* tensor) {
  const auto& object = *expect<Box<Object>>(value, where + ": properties");
  const auto* state = object.state.get<Tuple>();
  if (object.cls != Class::TensorProperties || !state ||
      state->items.size() != 5) {
    throw FormatError(where + ": properties are not those of a tensor");
  }
  const auto& items = state->items;
  tensor->dtype = expect<DType>(items[0], where + ": dtype");
  const auto& layout = expect<Layout>(items[1], where + ": layout");
  if (layout.name != "torch.strided") {
    throw UnsupportedFormat(where + ": layout is " + in_quotes(layout.name));
  }
  tensor->requires_grad = expect<bool>(items[2], where + ": requires_grad");
  tensor->memory_format =
      expect<MemoryFormat>(items[3], where + ": memory_format");
  tensor->pin_memory = expect<bool>(items[4], where + ": pin_memory");
}

bool lies_within(const DcpChunk& chunk, const std::vector<int64_t>& sizes) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (chunk.offsets[dim] < 0 || chunk.offsets[dim] > sizes[dim] ||
        chunk.sizes[dim] > sizes[dim] - chunk.offsets[dim]) {
      return false;
    }
  }
  return true;
}

DcpChunk read_chunk(
    const Value& value,
    const DcpTensor& tensor,
    const std::string& where,
    const StorageMap& storages) {
  const Fields fields(
      value,
      Class::ChunkStorageMetadata,
      where + ", a chunk",
      {"offsets", "sizes"});
  DcpChunk chunk;
  chunk.offsets = fields.get<Size>("offsets").dims;
  chunk.sizes = fields.get<Size>("sizes").dims;
  const auto numel = checked_numel(chunk.sizes);
  if (chunk.offsets.size() != tensor.sizes.size() ||
      chunk.sizes.size() != tensor.sizes.size() || !numel) {
    throw FormatError(where + " has a chunk of an impossible shape");
  }
  // Ranks without a part write an empty box; older releases of torch place it
  // anywhere.
  if (*numel != 0 && !lies_within(chunk, tensor.sizes)) {
    throw FormatError(where + " has a chunk outside the tensor");
  }
  const auto found =
      storages.find({.name = tensor.name, .offsets = chunk.offsets});
  if (found != storages.end()) {
    chunk.storage = found->second;
  } else if (*numel != 0) {
    throw FormatError(where + " has a chunk that storage_data does not place");
  }
  return chunk;
}

DcpTensor read_tensor(
    const std::string& name,
    const Value& value,
    const StorageMap& storages) {
  const std::string where = "tensor " + in_quotes(name);
  const Fields fields(
      value,
      Class::TensorStorageMetadata,
      where,
      {"properties", "size", "chunks"});
  DcpTensor tensor;
  tensor.name = name;
  tensor.sizes = fields.get<Size>("size").dims;
  read_properties(fields.at("properties"), where, &tensor);
  if (!checked_bytes(tensor.sizes, element_bytes(tensor.dtype))) {
    throw FormatError(where + " has an impossible size");
  }
  for (const auto& chunk : fields.get<List>("chunks").items) {
    tensor.chunks.push_back(read_chunk(chunk, tensor, where, storages));
  }
  return tensor;
}

DcpBytes read_bytes(
    const std::string& name,
    const Value& value,
    const StorageMap& storages) {
  const std::string where = "value " + in_quotes(name);
  const Fields fields(value, Class::BytesStorageMetadata, where, {});
  const auto found = storages.find({.name = name, .offsets = std::nullopt});
  if (found == storages.end()) {
    throw FormatError(where + " is not placed by storage_data");
  }
  return {.name = name, .storage = found->second};
}

void read_entries(
    const Value& value,
    const StorageMap& storages,
    DcpMetadata* metadata) {
  std::unordered_set<std::string_view> names;
  for (const auto& [key, entry] :
       expect<Dict>(value, "state_dict_metadata").items) {
    const auto& name = expect<std::string>(key, "a key of state_dict_metadata");
    if (!names.insert(name).second) {
      throw FormatError(in_quotes(name) + " appears twice");
    }
    const auto& object = *expect<Box<Object>>(entry, in_quotes(name));
    if (object.cls == Class::BytesStorageMetadata) {
      metadata->bytes.push_back(read_bytes(name, entry, storages));
    } else {
      metadata->tensors.push_back(read_tensor(name, entry, storages));
    }
  }
  for (const auto& [key, storage] : storages) {
    if (!names.contains(key.name)) {
      throw FormatError(
          "storage_data places " + in_quotes(key.name) +
          ", which does not exist");
    }
  }
}

std::vector<DcpPath> read_paths(const Value& value) {
  const std::string what = "planner_data (of another planner?)";
  std::vector<DcpPath> paths;
  for (const auto& [key, tuple] : expect<Dict>(value, what).items) {
    DcpPath path{.name = expect<std::string>(key, what), .keys = {}};
    for (const auto& part : expect<Tuple>(tuple, what).items) {
      if (const auto* position = part.get<int64_t>()) {
        path.keys.emplace_back(*position);
      } else {
        path.keys.emplace_back(expect<std::string>(part, what));
      }
    }
    paths.push_back(std::move(path));
  }
  return paths;
}

DcpStorageMeta read_storage_meta(const Value& value) {
  const Fields fields(
      value,
      Class::StorageMeta,
      "storage_meta",
      {"checkpoint_id", "save_id", "load_id", "modules"});
  const auto text = [&](std::string_view name) {
    return expect_optional_string(fields.find(name), fields.what(name));
  };
  DcpStorageMeta meta{
      .checkpoint_id = text("checkpoint_id"),
      .save_id = text("save_id"),
      .load_id = text("load_id"),
      .modules = {}};
  if (const auto* modules = fields.find("modules")) {
    meta.modules = expect_strings(*modules, fields.what("modules"));
  }
  return meta;
}

} // namespace

DcpMetadata read_dcp_metadata(ByteSpan bytes) {
  const Value root = read_pickle(bytes);
  const Fields fields(
      root,
      Class::Metadata,
      "the metadata",
      {"state_dict_metadata",
       "planner_data",
       "storage_data",
       "storage_meta",
       "version"});
  DcpMetadata metadata;
  // Checked first: a newer version may differ in everything else.
  metadata.version =
      expect_optional_string(fields.find("version"), fields.what("version"));
  if (metadata.version && !metadata.version->starts_with("1.")) {
    throw UnsupportedFormat(
        "version " + in_quotes(*metadata.version) + " of DCP, 1 is known");
  }
  const auto storages = read_storages(fields.at("storage_data"));
  read_entries(fields.at("state_dict_metadata"), storages, &metadata);
  const auto* paths = fields.find("planner_data");
  if (paths && !paths->get<None>()) {
    metadata.paths = read_paths(*paths);
  }
  const auto* meta = fields.find("storage_meta");
  if (meta && !meta->get<None>()) {
    metadata.storage_meta = read_storage_meta(*meta);
  }
  return metadata;
}

} // namespace tessera::format
