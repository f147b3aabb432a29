// What `tessera ckpt` writes, read by Python's torch.
#include "checkpoint/disk/python.h"

#include <gtest/gtest.h>

#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

TEST(CkptPythonTest, PythonReadsWhatIsWrittenBitByBit) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const ScratchFolder folder;
  const auto outcome = run_python(
      python,
      TESSERA_TOOLS_TESTS "/python_reads.py",
      {tessera::testing::tessera_program(), folder.path()});
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

} // namespace
} // namespace tessera::checkpoint
