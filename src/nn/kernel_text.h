// The kernel's source, for NVRTC: defined by a file made at build time.
#pragma once

#include <string_view>

namespace tessera::nn {

extern const std::string_view kCrossEntropyCu;

} // namespace tessera::nn
