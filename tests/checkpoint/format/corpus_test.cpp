// The corpus of the fuzzers, and damage to the goldens.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/fuzz_targets.h"
#include "checkpoint/format/memory_peak.h"
#include "checkpoint/format/pickle_reader.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/torch_file.h"
#include "exported/format/archive_reader.h"

namespace tessera::format {
namespace {

struct Format {
  std::string name; // folder in corpus/
  std::function<void(ByteSpan)> fuzz;
  std::function<void(ByteSpan)> read;
  std::vector<std::string> goldens;
};

std::ostream& operator<<(std::ostream& out, const Format& format) {
  return out << format.name;
}

const std::vector<std::string> kMetadata = {
    "plain/.metadata",
    "flat.metadata",
    "fsdp2.metadata",
    "old.metadata"};

class CorpusTest : public testing::TestWithParam<Format> {};

TEST_P(CorpusTest, SurvivesTheCorpus) {
  int count = 0;
  const auto folder = std::string(TESSERA_FORMAT_CORPUS "/") + GetParam().name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path());
    GetParam().fuzz(as_bytes(read_file(entry.path())));
    ++count;
  }
  EXPECT_GT(count, 0) << folder << " is empty";
}

TEST_P(CorpusTest, AcceptsTheGoldens) {
  for (const auto& name : GetParam().goldens) {
    EXPECT_EQ(
        refusal([&] { GetParam().read(as_bytes(golden(name))); }), "accepted")
        << name;
    GetParam().fuzz(as_bytes(golden(name)));
  }
}

TEST_P(CorpusTest, RejectsEveryTruncation) {
  for (const auto& name : GetParam().goldens) {
    const auto good = golden(name);
    for (size_t length = 0; length < good.size(); ++length) {
      // Memory of exactly this length, so that ASan sees a read beyond.
      const std::vector<uint8_t> cut(good.begin(), good.begin() + length);
      ASSERT_NE(refusal([&] { GetParam().read(cut); }), "accepted")
          << name << " cut after " << length << " bytes";
    }
  }
}

TEST_P(CorpusTest, SurvivesFlippedBits) {
  for (const auto& name : GetParam().goldens) {
    const auto good = golden(name);
    // Every bit of small ones; of the others one in each byte.
    const size_t step = good.size() < 2000 ? 1 : 9;
    for (size_t bit = 0; bit < 8 * good.size(); bit += step) {
      auto bad = good;
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
      refusal([&] { GetParam().read(as_bytes(bad)); });
    }
  }
}

// A few hundred bytes of memory for each byte of input, whatever it asks for.
TEST_P(CorpusTest, PeaksBelowAMultipleOfTheInput) {
  const auto check = [&](const std::string& bytes, const std::string& name) {
    const size_t limit = 300 * bytes.size() + (1 << 20);
    const size_t peak = peak_bytes_of(
        [&] { refusal([&] { GetParam().read(as_bytes(bytes)); }); });
    EXPECT_LE(peak, limit) << name;
  };
  const auto folder = std::string(TESSERA_FORMAT_CORPUS "/") + GetParam().name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    check(read_file(entry.path()), entry.path());
  }
  for (const auto& name : GetParam().goldens) {
    auto bytes = golden(name);
    check(bytes, name);
    for (size_t i = 0; i < bytes.size(); i += 5) {
      const char kept = std::exchange(bytes[i], '\xff');
      check(bytes, name + " with byte " + std::to_string(i) + " set");
      bytes[i] = kept;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats,
    CorpusTest,
    testing::Values(
        Format{"pickle", fuzz_pickle, read_pickle, {"flat.metadata"}},
        Format{"metadata", fuzz_metadata, read_dcp_metadata, kMetadata},
        Format{
            "safetensors",
            fuzz_safetensors,
            read_safetensors,
            {"kinds.safetensors"}},
        Format{
            "torch_file",
            fuzz_torch_file,
            read_torch_file,
            {"kinds.pt", "weights.pt", "optim.pt"}},
        Format{
            "exported",
            fuzz_exported,
            [](ByteSpan bytes) { exported::read_archive(bytes); },
            {"tiny.pt2"}}),
    [](const auto& param) { return param.param.name; });

// Goldens and damage: tests/checkpoint/disk/checksums_test.cpp.
TEST(ChecksumsCorpusTest, SurvivesTheCorpus) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           TESSERA_FORMAT_CORPUS "/checksums")) {
    fuzz_checksums(as_bytes(read_file(entry.path())));
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(PickleMemoryTest, PeaksBelowAMultipleOfTheInput) {
  // The most values that bytes can ask for: one each, in one list.
  const std::string values =
      std::string("\x80\x02](") + std::string(1 << 20, 'N') + "e.";
  // And the most text: a string of 96 bytes for every two.
  std::string text = "\x80\x02](X" + std::string("\x60\0\0\0", 4) +
      std::string(96, 'x') + "\x94";
  for (int i = 0; i < (1 << 19); ++i) {
    text += std::string("h\0", 2);
  }
  text += "e.";
  for (const auto& bytes : {values, text}) {
    EXPECT_LE(
        peak_bytes_of([&] { fuzz_pickle(as_bytes(bytes)); }),
        300 * bytes.size());
  }
}

} // namespace
} // namespace tessera::format
