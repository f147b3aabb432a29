#include <utility>

#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/pickle_writer.h"

namespace tessera::format {
namespace {

Value object(Class cls, Dict fields) {
  return Object{.cls = cls, .state = std::move(fields)};
}

Dict fields(std::initializer_list<DictItem> items) {
  return Dict{items};
}

Value string_list(const std::vector<std::string>& strings) {
  List list;
  list.items.assign(strings.begin(), strings.end());
  return list;
}

Value optional_string(const std::optional<std::string>& text) {
  return text ? Value(*text) : Value(None{});
}

Value properties(const DcpTensor& tensor) {
  Tuple state;
  state.items = {
      tensor.dtype,
      Layout{"torch.strided"},
      tensor.requires_grad,
      tensor.memory_format,
      tensor.pin_memory};
  return Object{.cls = Class::TensorProperties, .state = std::move(state)};
}

Value tensor_entry(const DcpTensor& tensor) {
  List chunks;
  for (const auto& chunk : tensor.chunks) {
    chunks.items.push_back(object(
        Class::ChunkStorageMetadata,
        fields(
            {{"offsets", Size{chunk.offsets}}, {"sizes", Size{chunk.sizes}}})));
  }
  return object(
      Class::TensorStorageMetadata,
      fields(
          {{"properties", properties(tensor)},
           {"size", Size{tensor.sizes}},
           {"chunks", std::move(chunks)}}));
}

Value storage_info(const DcpStorage& storage) {
  Dict info = fields(
      {{"relative_path", storage.file},
       {"offset", storage.offset},
       {"length", storage.length}});
  if (!storage.transforms.empty()) {
    info.add("transform_descriptors", string_list(storage.transforms));
  }
  return object(Class::StorageInfo, std::move(info));
}

Dict storage_data(const DcpMetadata& metadata) {
  Dict storages;
  for (const auto& tensor : metadata.tensors) {
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      const auto& chunk = tensor.chunks[i];
      if (chunk.storage) {
        storages.add(
            object(
                Class::MetadataIndex,
                fields(
                    {{"fqn", tensor.name},
                     {"index", static_cast<int64_t>(i)},
                     {"offset", Size{chunk.offsets}}})),
            storage_info(*chunk.storage));
      }
    }
  }
  for (const auto& entry : metadata.bytes) {
    storages.add(
        object(
            Class::MetadataIndex,
            fields({{"fqn", entry.name}, {"index", None{}}})),
        storage_info(entry.storage));
  }
  return storages;
}

Value planner_data(const DcpMetadata& metadata) {
  if (!metadata.paths) {
    return None{};
  }
  Dict data;
  for (const auto& path : *metadata.paths) {
    Tuple keys;
    for (const auto& key : path.keys) {
      keys.items.push_back(
          std::visit([](const auto& part) { return Value(part); }, key));
    }
    data.add(path.name, std::move(keys));
  }
  return data;
}

Value storage_meta(const DcpMetadata& metadata) {
  if (!metadata.storage_meta) {
    return None{};
  }
  const auto& meta = *metadata.storage_meta;
  return object(
      Class::StorageMeta,
      fields(
          {{"checkpoint_id", optional_string(meta.checkpoint_id)},
           {"save_id", optional_string(meta.save_id)},
           {"load_id", optional_string(meta.load_id)},
           {"modules", string_list(meta.modules)}}));
}

} // namespace

std::string write_dcp_metadata(const DcpMetadata& metadata) {
  Dict entries;
  for (const auto& tensor : metadata.tensors) {
    entries.add(tensor.name, tensor_entry(tensor));
  }
  for (const auto& entry : metadata.bytes) {
    entries.add(entry.name, object(Class::BytesStorageMetadata, {}));
  }
  return write_pickle(object(
      Class::Metadata,
      fields(
          {{"state_dict_metadata", std::move(entries)},
           {"planner_data", planner_data(metadata)},
           {"storage_data", storage_data(metadata)},
           {"storage_meta", storage_meta(metadata)},
           {"version", optional_string(metadata.version)}})));
}

} // namespace tessera::format
