// The fuzzed functions: each takes any bytes and must return. make fuzz gives
// them to libFuzzer, corpus_test.cpp runs them over the corpus.
#pragma once

#include "checkpoint/format/bytes.h"

namespace tessera::format {

/// Aborts unless what was read and written again is read the same.
void fuzz_pickle(ByteSpan bytes);
void fuzz_metadata(ByteSpan bytes);
void fuzz_safetensors(ByteSpan bytes);
void fuzz_torch_file(ByteSpan bytes);
void fuzz_checksums(ByteSpan bytes);
/// Aborts if a tensor that was accepted reaches out of the archive.
void fuzz_exported(ByteSpan bytes);

} // namespace tessera::format
