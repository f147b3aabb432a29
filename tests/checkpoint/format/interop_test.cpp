// What we write, read by Python's torch: interop.py compares.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::format {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int status;
  std::string output;
};

Outcome run(const std::string& command) {
  Outcome outcome{};
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t count = fread(buffer, 1, sizeof(buffer), pipe)) {
    outcome.output.append(buffer, count);
  }
  outcome.status = pclose(pipe);
  return outcome;
}

class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = fs::temp_directory_path() / "tessera-format-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchFolder() {
    fs::remove_all(path_);
  }
  std::string operator/(const std::string& name) const {
    return path_ / name;
  }
  std::string path() const {
    return path_;
  }

 private:
  fs::path path_;
};

TEST(InteropTest, PythonReadsWhatWeWriteAsItsOwn) {
  std::string python;
  std::getline(std::ifstream(TESSERA_PYTHON_FILE), python);
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const ScratchFolder ours;
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
  const auto outcome =
      run("'" + python +
          "' -W ignore '" TESSERA_FORMAT_GOLDENS
          "/../interop.py' '" TESSERA_FORMAT_GOLDENS "' '" +
          ours.path() + "'");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

} // namespace
} // namespace tessera::format
