// The allow-list: every global that a pickle may name.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

enum class Global : uint8_t {
  Object, // a class of torch.distributed.checkpoint
  MemoryFormat,
  Size,
  Device,
  DType,
  TypedStorage,
  UntypedStorage,
  GetLayout,
  RebuildTensor,
  RebuildTensorV2,
  RebuildTensorV3,
  RebuildParameter,
  OrderedDict,
  Counter,
  Encode,
  Bytes,
  ByteArray,
  Complex,
  Set,
  GetAttr,
  Path,
};

struct GlobalRef {
  Global global;
  Class cls{}; // of kObject
  DType dtype{}; // of kDType and kTypedStorage
};

/// Nothing if the global is not on the list.
std::optional<GlobalRef> find_global(
    std::string_view module,
    std::string_view name);

struct GlobalName {
  std::string_view module;
  std::string_view name;
};

/// Where torch 2.13 has it.
GlobalName name_of(Class cls);

} // namespace tessera::format
