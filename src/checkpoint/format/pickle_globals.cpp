#include "checkpoint/format/pickle_globals.h"

namespace tessera::format {
namespace {

constexpr std::string_view kMetadataModule =
    "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFileSystem =
    "torch.distributed.checkpoint.filesystem";
// Until torch 1.13, and still written by programs that import from there.
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
    {Class::kMetadata, kMetadataModule, kOldMetadata, "Metadata"},
    {Class::kTensorStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "TensorStorageMetadata"},
    {Class::kBytesStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "BytesStorageMetadata"},
    {Class::kChunkStorageMetadata,
     kMetadataModule,
     kOldMetadata,
     "ChunkStorageMetadata"},
    {Class::kTensorProperties,
     kMetadataModule,
     kShardedTensor,
     "TensorProperties"},
    {Class::kMetadataIndex, kMetadataModule, kOldMetadata, "MetadataIndex"},
    {Class::kStorageInfo, kFileSystem, kOldFileSystem, "_StorageInfo"},
    {Class::kStorageMeta, kMetadataModule, kOldMetadata, "StorageMeta"},
};

struct GlobalRow {
  std::string_view module;
  std::string_view name;
  Global global;
};
constexpr GlobalRow kRows[] = {
    {kMetadataModule, "_MEM_FORMAT_ENCODING", Global::kMemoryFormat},
    {kShardedTensor, "MEM_FORMAT_ENCODING", Global::kMemoryFormat},
    {"torch", "Size", Global::kSize},
    {"torch", "device", Global::kDevice},
    {"torch.storage", "UntypedStorage", Global::kUntypedStorage},
    {"torch", "UntypedStorage", Global::kUntypedStorage},
    {"torch.serialization", "_get_layout", Global::kGetLayout},
    {"torch._utils", "_rebuild_tensor", Global::kRebuildTensor},
    {"torch._utils", "_rebuild_tensor_v2", Global::kRebuildTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", Global::kRebuildTensorV3},
    {"torch._utils", "_rebuild_parameter", Global::kRebuildParameter},
    {"collections", "OrderedDict", Global::kOrderedDict},
    {"collections", "Counter", Global::kCounter},
    {"_codecs", "encode", Global::kEncode},
    {"builtins", "bytes", Global::kBytes},
    {"builtins", "bytearray", Global::kByteArray},
    {"builtins", "complex", Global::kComplex},
    {"builtins", "set", Global::kSet},
    {"builtins", "frozenset", Global::kSet},
    {"builtins", "getattr", Global::kGetAttr},
    {"pathlib", "PosixPath", Global::kPath},
    {"pathlib", "PurePosixPath", Global::kPath},
    // Python 3.13.
    {"pathlib._local", "PosixPath", Global::kPath},
    {"pathlib._local", "PurePosixPath", Global::kPath},
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
      return GlobalRef{.global = Global::kObject, .cls = row.cls};
    }
  }
  for (const auto& row : kRows) {
    if (row.name == name && row.module == module) {
      return GlobalRef{.global = row.global};
    }
  }
  if (module == "torch") {
    if (const auto dtype = dtype_of_torch_name(name)) {
      return GlobalRef{.global = Global::kDType, .dtype = *dtype};
    }
    if (const auto dtype = dtype_of_storage_name(name)) {
      return GlobalRef{.global = Global::kTypedStorage, .dtype = *dtype};
    }
  }
  return std::nullopt;
}

GlobalName name_of(Class cls) {
  const auto& row = kClasses[static_cast<size_t>(cls)];
  return {row.module, row.name};
}

} // namespace tessera::format
