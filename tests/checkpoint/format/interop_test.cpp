// What we write, read by Python's torch: interop.py compares.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "checkpoint/disk/python.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::format {
namespace {

namespace fs = std::filesystem;

TEST(InteropTest, PythonReadsWhatWeWriteAsItsOwn) {
  const std::string python = checkpoint::python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const checkpoint::ScratchFolder ours;
  fs::copy(TESSERA_FORMAT_GOLDENS "/plain", ours / "plain");
  for (const char* name :
       {"plain/.metadata", "flat.metadata", "fsdp2.metadata", "old.metadata"}) {
    write_file(
        ours / name,
        write_dcp_metadata(read_dcp_metadata(as_bytes(golden(name)))));
  }
  for (const std::string name : {"kinds", "weights", "optim"}) {
    const auto bytes = golden(name + ".pt");
    write_file(
        ours / (name + ".pkl"),
        write_pickle(read_torch_file(as_bytes(bytes)).value));
  }
  const auto outcome = checkpoint::run_python(
      python,
      TESSERA_FORMAT_GOLDENS "/../interop.py",
      {TESSERA_FORMAT_GOLDENS, ours.path()});
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

} // namespace
} // namespace tessera::format
