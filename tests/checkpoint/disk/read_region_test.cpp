#include "checkpoint/disk/read_region.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/handmade.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {
namespace {

// Reads the region into memory of the given strides (in elements) and returns
// it row by row.
std::vector<float> read_through(
    const Source& source,
    const std::vector<int64_t>& begin,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides,
    int64_t memory_numel) {
  const auto& tensor = source.tensors()[0];
  const auto& box = tensor.boxes[0];
  std::vector<float> memory(static_cast<size_t>(memory_numel), -1);
  std::vector<int64_t> in_bytes = strides;
  for (auto& stride : in_bytes) {
    stride *= static_cast<int64_t>(sizeof(float));
  }
  BlockReader reader(source);
  read_region(
      reader,
      tensor,
      box,
      source.locate(tensor, box),
      begin,
      sizes,
      reinterpret_cast<uint8_t*>(memory.data()),
      in_bytes);
  std::vector<float> rows;
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      rows.push_back(
          memory[static_cast<size_t>(i * strides[0] + j * strides[1])]);
    }
  }
  return rows;
}

std::vector<float> expected_of(
    const std::vector<int64_t>& begin,
    const std::vector<int64_t>& sizes,
    int64_t columns) {
  std::vector<float> rows;
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      rows.push_back(
          static_cast<float>((begin[0] + i) * columns + begin[1] + j));
    }
  }
  return rows;
}

enum class Stored { RowMajor, Transposed, View };

class ReadRegionTest
    : public ::testing::TestWithParam<std::tuple<Stored, bool>> {
 protected:
  static constexpr int64_t kRows = 700;
  static constexpr int64_t kColumns = 600; // 1.6 MB: two blocks

  void SetUp() override {
    HandmadeDcp dcp(folder_ / "d", {kRows, kColumns});
    dcp.add_item("f", {0, 0}, {kRows, kColumns}, item());
    dcp.write();
    if (std::get<bool>(GetParam())) {
      dcp.write_checksums();
    }
    source_ = Source::open(folder_ / "d");
  }

  // The same elements, kept in three ways.
  static std::string item() {
    constexpr int64_t kPadding = 5; // of each row of the view
    auto tensor = float_tensor({kRows, kColumns}, kRows * kColumns);
    std::string bytes;
    switch (std::get<Stored>(GetParam())) {
      case Stored::RowMajor:
        bytes = counting(0, kRows * kColumns);
        break;
      case Stored::Transposed:
        tensor.strides = {1, kRows};
        for (int64_t j = 0; j < kColumns; ++j) {
          for (int64_t i = 0; i < kRows; ++i) {
            bytes += counting(i * kColumns + j, 1);
          }
        }
        break;
      case Stored::View:
        tensor.offset = 3;
        tensor.strides = {kColumns + kPadding, 1};
        bytes = counting(-1000, 3);
        for (int64_t i = 0; i < kRows; ++i) {
          bytes += counting(i * kColumns, kColumns) + counting(-1000, kPadding);
        }
        tensor.storage.numel =
            static_cast<int64_t>(bytes.size() / sizeof(float));
        break;
    }
    return torch_file(tensor, bytes);
  }

  const ScratchFolder folder_;
  std::unique_ptr<Source> source_;
};

TEST_P(ReadRegionTest, WholeBox) {
  EXPECT_EQ(
      read_through(
          *source_, {0, 0}, {kRows, kColumns}, {kColumns, 1}, kRows * kColumns),
      expected_of({0, 0}, {kRows, kColumns}, kColumns));
}

TEST_P(ReadRegionTest, PartsIntoAnyStrides) {
  const std::vector<int64_t> begin{13, 250};
  const std::vector<int64_t> sizes{401, 77};
  const auto expected = expected_of(begin, sizes, kColumns);
  // Contiguous, with gaps, and transposed.
  EXPECT_EQ(read_through(*source_, begin, sizes, {77, 1}, 401 * 77), expected);
  EXPECT_EQ(
      read_through(*source_, begin, sizes, {100, 1}, 401 * 100), expected);
  EXPECT_EQ(read_through(*source_, begin, sizes, {1, 401}, 401 * 77), expected);
}

TEST_P(ReadRegionTest, OneElementAndNone) {
  EXPECT_EQ(
      read_through(*source_, {699, 599}, {1, 1}, {1, 1}, 1),
      expected_of({699, 599}, {1, 1}, kColumns));
  EXPECT_TRUE(read_through(*source_, {0, 0}, {0, 4}, {4, 1}, 1).empty());
}

std::string case_name(
    const ::testing::TestParamInfo<std::tuple<Stored, bool>>& param) {
  static constexpr const char* kNames[] = {"RowMajor", "Transposed", "View"};
  const auto [stored, is_summed] = param.param;
  return std::string(kNames[static_cast<int>(stored)]) +
      (is_summed ? "Summed" : "");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ReadRegionTest,
    ::testing::Combine(
        ::testing::Values(Stored::RowMajor, Stored::Transposed, Stored::View),
        ::testing::Bool()),
    case_name);

} // namespace
} // namespace tessera::checkpoint
