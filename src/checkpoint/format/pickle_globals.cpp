#include "checkpoint/format/pickle_globals.h"

namespace tessera::format {
namespace {

constexpr std::string_view kMetadataModule =
    "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFileSystem =
    "torch.distributed.checkpoint.filesystem";
// The names until torch 1.13, still written by programs that import from there.
constexpr std::string_view kOldMetadata =
    "torch.distributed._shard.checkpoint.metadata";
constexpr std::string_view kOldFileSystem =
    "torch.distributed._shard.checkpoint.filesystem";
// Where early releases of 2.x had TensorProperties.
constexpr std::string_view kShardedTensor =
    "torch.distributed._shard.sharded_tensor.metadata";

struct ClassRow {
  Class cls;
  std::string_view module;
  std::string_view old_module;
  std::string_view name;
};
// In the order of the enum.
constexpr ClassRow kClasses[] = {
    {Class::Metadata, kMetadataModule, kOldMetadata, "Metadata"},
    {Class::TensorStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "TensorStorageMetadata"},
    {Class::BytesStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "BytesStorageMetadata"},
    {Class::ChunkStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "ChunkStorageMetadata"},
    {Class::TensorProperties,
     kMetadataModule,
     kShardedTensor,
     "TensorProperties"},
    {Class::MetadataIndex, kMetadataModule, kOldMetadata, "MetadataIndex"},
    {Class::StorageInfo, kFileSystem, kOldFileSystem, "_StorageInfo"},
    {Class::StorageMeta, kMetadataModule, kOldMetadata, "StorageMeta"},
};

struct GlobalRow {
  std::string_view module;
  std::string_view name;
  Global global;
};
constexpr GlobalRow kRows[] = {
    {kMetadataModule, "_MEM_FORMAT_ENCODING", Global::MemoryFormat},
    {kShardedTensor, "MEM_FORMAT_ENCODING", Global::MemoryFormat},
    {"torch", "Size", Global::Size},
    {"torch", "device", Global::Device},
    {"torch.storage", "UntypedStorage", Global::UntypedStorage},
    {"torch", "UntypedStorage", Global::UntypedStorage},
    {"torch.serialization", "_get_layout", Global::GetLayout},
    {"torch._utils", "_rebuild_tensor", Global::RebuildTensor},
    {"torch._utils", "_rebuild_tensor_v2", Global::RebuildTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", Global::RebuildTensorV3},
    {"torch._utils", "_rebuild_parameter", Global::RebuildParameter},
    {"collections", "OrderedDict", Global::OrderedDict},
    {"collections", "Counter", Global::Counter},
    {"_codecs", "encode", Global::Encode},
    {"builtins", "bytes", Global::Bytes},
    {"builtins", "bytearray", Global::ByteArray},
    {"builtins", "complex", Global::Complex},
    {"builtins", "set", Global::Set},
    {"builtins", "frozenset", Global::Set},
    {"builtins", "getattr", Global::GetAttr},
    {"pathlib", "PosixPath", Global::Path},
    {"pathlib", "PurePosixPath", Global::Path},
    // Python 3.13.
    {"pathlib._local", "PosixPath", Global::Path},
    {"pathlib._local", "PurePosixPath", Global::Path},
};

} // namespace

std::optional<GlobalRef> find_global(
    std::string_view module,
    std::string_view name) {
  if (module == "__builtin__") { // as protocol 2 spells it
    module = "builtins";
  }
  for (const auto& row : kClasses) {
    if (row.name == name &&
        (row.module == module || row.old_module == module)) {
      return GlobalRef{.global = Global::Object, .cls = row.cls};
    }
  }
  for (const auto& row : kRows) {
    if (row.name == name && row.module == module) {
      return GlobalRef{.global = row.global};
    }
  }
  if (module == "torch") {
    if (const auto dtype = dtype_of_torch_name(name)) {
      return GlobalRef{.global = Global::DType, .dtype = *dtype};
    }
    if (const auto dtype = dtype_of_storage_name(name)) {
      return GlobalRef{.global = Global::TypedStorage, .dtype = *dtype};
    }
  }
  return std::nullopt;
}

GlobalName name_of(Class cls) {
  const auto& row = kClasses[static_cast<size_t>(cls)];
  return {row.module, row.name};
}

} // namespace tessera::format
