// libFuzzer's entry, compiled once for each target.
#include "checkpoint/format/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tessera::format::TESSERA_FUZZ_TARGET({data, size});
  return 0;
}
