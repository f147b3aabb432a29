#include "checkpoint/format/exported_mutator.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/json_spans.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/zip_reader.h"
#include "exported/format/program_reader.h"

namespace tessera::format {
namespace {

constexpr size_t kMaxSize = 65536;
constexpr int kChanges = 2000;

std::string seed_of(const std::string& name) {
  return read_file(TESSERA_FORMAT_CORPUS "/exported/" + name);
}

// Blind changes of it break JSON, and move what lies behind them.
ExportedMutator mutator(uint32_t seed) {
  return {seed, [](std::string bytes, size_t) {
            return bytes.insert(bytes.size() / 2, 1, '"');
          }};
}

// Of kChanges changes, five to the seed and then anew, as libFuzzer does.
int count_good(
    const std::string& seed,
    const std::function<bool(const std::string&)>& is_good) {
  int count = 0;
  std::string bytes;
  for (int i = 0; i < kChanges; ++i) {
    const auto changed = mutator(i).change(i % 5 == 0 ? seed : bytes, kMaxSize);
    EXPECT_LE(changed.size(), kMaxSize);
    count += changed != bytes && is_good(changed);
    bytes = changed;
  }
  return count;
}

TEST(JsonSpansTest, ValuesComeWithNamesAndParents) {
  const std::string text = R"({"a": [1, "b:\"c"], "d":{}, "e": null})";
  const auto values = find_json_values(text);
  std::vector<std::string> found;
  for (const auto& value : values) {
    found.push_back(
        text.substr(value.name_begin, value.name_end - value.name_begin) + " " +
        text.substr(value.begin, value.end - value.begin) + " " +
        std::to_string(value.parent));
  }
  EXPECT_EQ(
      found,
      (std::vector<std::string>{
          " " + text + " 0",
          R"("a" [1, "b:\"c"] 0)",
          " 1 1",
          R"( "b:\"c" 1)",
          R"("d" {} 0)",
          R"("e" null 0)"}));
}

TEST(JsonSpansTest, WhatIsLeftOpenHasNoValues) {
  for (const auto* text : {"", "{", "[1", "]", "\"a", "{\"a\":\"\\\"}"}) {
    EXPECT_TRUE(find_json_values(text).empty()) << text;
  }
}

TEST(ExportedMutatorTest, MostChangesLeaveJson) {
  for (const auto* name : {"signature.json", "symbols.json", "trees.json"}) {
    const int good = count_good(seed_of(name), [](const auto& changed) {
      const auto why =
          refusal([&] { exported::read_program(changed, "m.json"); });
      return why.find("this is not JSON") == why.npos;
    });
    EXPECT_GT(good, kChanges / 2) << name;
  }
}

TEST(ExportedMutatorTest, MostChangesLeaveTheDirectoryOfAnArchiveRight) {
  for (const auto* name : {"least.pt2", "tensors.pt2", "two.pt2"}) {
    const int good = count_good(seed_of(name), [](const auto& changed) {
      return refusal([&] { read_zip(as_bytes(changed)); }) == "accepted";
    });
    EXPECT_GT(good, kChanges / 2) << name;
  }
}

TEST(ExportedMutatorTest, ACrossingTakesFromTheOther) {
  const std::string text = R"({"ours":[0]})";
  int count = 0;
  for (int i = 0; i < 100; ++i) {
    const auto crossed =
        mutator(i).cross(text, R"({"theirs":"theirs"})", kMaxSize);
    count += crossed.find("theirs") != crossed.npos;
  }
  EXPECT_GT(count, 25);
}

TEST(ExportedMutatorTest, TheSeedDecides) {
  const auto bytes = seed_of("two.pt2");
  EXPECT_EQ(
      mutator(7).change(bytes, kMaxSize), mutator(7).change(bytes, kMaxSize));
}

} // namespace
} // namespace tessera::format
