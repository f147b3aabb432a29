#include <tessera/version.h>

#include "libtorch/compat.h"

namespace tessera {

const char* version() {
  return TESSERA_VERSION_STRING;
}

const char* libtorch_version() {
  return TORCH_VERSION;
}

} // namespace tessera
