// The shape of a GPT. Apart from the model, so that the settings are read
// without LibTorch.
#pragma once

#include <cstdint>

namespace gpt {

struct GptConfig {
  int64_t vocabulary = 256;
  int64_t length = 128; // the most tokens the model looks at
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 128;
  double dropout = 0.0;
};

} // namespace gpt
