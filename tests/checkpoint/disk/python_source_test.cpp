// Checkpoints that Python's torch writes, read bit by bit: python_source.py
// writes them.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/disk/python.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

TEST(PythonSourceTest, ReadsWhatTorchWritesBitByBit) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const ScratchFolder folder;
  const auto outcome = run_python(
      python, TESSERA_STORE_TESTS "/python_source.py", {folder.path()});
  ASSERT_EQ(outcome.status, 0) << outcome.output;

  std::map<std::string, std::unique_ptr<Source>> sources;
  std::map<std::string, size_t> num_entries;
  std::ifstream manifest(folder / "manifest");
  size_t num_tensors = 0;
  for (std::string line; std::getline(manifest, line);) {
    SCOPED_TRACE(line);
    const auto parts = split(line, '\t');
    auto& source = sources[parts[0]];
    if (!source) {
      source = Source::open(folder / parts[0]);
    }
    ++num_entries[parts[0]];
    if (parts[2] == "value") {
      const auto* value = source->find_value(parts[1]);
      ASSERT_TRUE(value);
      EXPECT_NO_THROW(source->value(*value));
      continue;
    }
    ++num_tensors;
    const auto* tensor = source->find_tensor(parts[1]);
    ASSERT_TRUE(tensor);
    EXPECT_EQ(format::info(tensor->dtype).torch_name, parts[2]);
    std::vector<int64_t> sizes;
    for (const auto& size : split(parts[3], ',')) {
      sizes.push_back(std::stoll(size));
    }
    EXPECT_EQ(tensor->sizes, sizes);
    EXPECT_TRUE(
        read_tensor(*source, parts[1]) == format::read_file(folder / parts[4]));
  }
  EXPECT_EQ(sources.size(), 5);
  EXPECT_GT(num_tensors, 60);
  for (const auto& [name, source] : sources) {
    EXPECT_EQ(
        source->tensors().size() + source->values().size(), num_entries[name])
        << name;
  }
}

} // namespace
} // namespace tessera::checkpoint
