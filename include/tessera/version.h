#pragma once

#include <tessera/api.h>

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0
#define TESSERA_VERSION_STRING "0.1.0"

namespace tessera {

/// Version of the Tessera library that is loaded ("0.1.0"). Static storage.
TESSERA_API const char* version();

/// Version of the LibTorch that Tessera was compiled against ("2.13.0").
/// Static storage.
TESSERA_API const char* libtorch_version();

} // namespace tessera
