// The allow-list: every global that a pickle may name.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/value.h"

namespace tessera::format {

enum class Global : uint8_t {
  kObject, // a class of torch.distributed.checkpoint
  kMemoryFormat,
  kSize,
  kDevice,
  kDType,
  kTypedStorage,
  kUntypedStorage,
  kGetLayout,
  kRebuildTensor,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kOrderedDict,
  kCounter,
  kEncode,
  kBytes,
  kByteArray,
  kComplex,
  kSet,
  kGetAttr,
  kPath,
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
