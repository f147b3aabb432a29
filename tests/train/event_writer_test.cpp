// Event files: their bytes, what is left of them after a kill and on a full
// disk, and what TensorBoard reads in them.
#include <tessera/train/event_writer.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <thread>

#include "base/crc32c.h"
#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/warnings.h"
#include "train/append_file.h"
#include "train/event_record.h"
#include "train/origin.h"
#include "train/tensorboard.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(
        static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

uint64_t number_at(const std::string& bytes, size_t at, size_t size) {
  uint64_t number = 0;
  for (size_t i = 0; i < size; ++i) {
    number |= uint64_t{static_cast<uint8_t>(bytes.at(at + i))} << (8 * i);
  }
  return number;
}

/// The payloads of a file, whose checksums must be right. A record that is torn
/// at the end does not count.
std::vector<std::string> payloads(const fs::path& path) {
  const std::string bytes = read_bytes(path);
  std::vector<std::string> found;
  for (size_t at = 0; at + 16 <= bytes.size();) {
    const auto length = number_at(bytes, at, 8);
    if (at + length + 16 > bytes.size()) {
      break;
    }
    EXPECT_EQ(number_at(bytes, at + 8, 4), masked_crc32c(bytes.substr(at, 8)));
    found.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(
        number_at(bytes, at + 12 + length, 4), masked_crc32c(found.back()));
    at += length + 16;
  }
  return found;
}

TEST(Crc32cTest, GivesTheValuesOfRfc3720) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AA);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43);
  std::string ascending;
  for (char byte = 0; byte < 32; ++byte) {
    ascending.push_back(byte);
  }
  EXPECT_EQ(crc32c(ascending), 0x46DD794E);
  EXPECT_EQ(
      crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113FDB5C);
}

// Bytes that TensorBoard's RecordWriter wrote of events that it serialized.
TEST(EventRecordTest, BytesAreThoseOfTensorBoard) {
  EXPECT_EQ(
      train::framed(train::version_event(1.5)),
      from_hex("1800000000000000a37f4b2209000000000000f83f1a0d627261696e"
               "2e4576656e743a322a28646c"));
  EXPECT_EQ(
      train::framed(train::restart_event(2.25, 301)),
      from_hex("100000000000000095fbfe1809000000000000024010ad023a020801"
               "518d2ae0"));
  const std::vector<EventScalar> scalars{{"train/loss", 0.25}, {"lr", -1e-3}};
  EXPECT_EQ(
      train::framed(train::scalars_event(1.7e9, 300, scalars)),
      from_hex("2c00000000000000f4aecc450900000040fc54d94110ac022a1e0a11"
               "0a0a747261696e2f6c6f7373150000803e0a090a026c72156f1283ba"
               "2dffd88a"));
}

TEST(EventWriterTest, TensorBoardReadsTheValuesBack) {
  TESSERA_NEEDS_TENSORBOARD();
  const TempFolder folder;
  const double before = train::time_now();
  {
    EventWriter events(folder / "tensorboard");
    EXPECT_TRUE(events.is_writing());
    EXPECT_THAT(
        events.path().filename().string(),
        MatchesRegex("events\\.out\\.tfevents\\.[0-9]+\\..*"));
    for (int64_t step = 1; step <= 300; ++step) {
      events.add_step(
          step,
          {{"train/loss", 1.0 / static_cast<double>(step)},
           {"train/lr", 1e-3}});
    }
    events.add_scalar("validation/loss", 0.125, int64_t{1} << 40);
    events.add_scalar("caf\xC3\xA9", std::nan(""), 1);
    events.add_scalar("caf\xC3\xA9", -HUGE_VAL, 2);
    events.add_step(2, {});
  }
  const json found = read_with_tensorboard(folder / "tensorboard");
  EXPECT_EQ(found.at("versions"), json::array({"brain.Event:2"}));
  for (const double time : found.at("times")) {
    EXPECT_GE(time, before);
    EXPECT_LE(time, train::time_now());
  }
  const json& curves = found.at("curves");
  EXPECT_EQ(curves.size(), 4);
  ASSERT_EQ(curves.at("train/loss").size(), 300);
  for (int64_t step = 1; step <= 300; ++step) {
    const json& point =
        curves.at("train/loss").at(static_cast<size_t>(step) - 1);
    EXPECT_EQ(point.at(0), step);
    EXPECT_EQ(
        point.at(1).get<double>(),
        static_cast<double>(
            static_cast<float>(1.0 / static_cast<double>(step))));
  }
  EXPECT_EQ(
      curves.at("validation/loss"),
      json::array({json::array({int64_t{1} << 40, 0.125})}));
  EXPECT_EQ(
      curves.at("caf\xC3\xA9"),
      json::array({json::array({1, "nan"}), json::array({2, "-inf"})}));
}

TEST(EventWriterTest, AResumedRunHidesWhatItMakesAgain) {
  TESSERA_NEEDS_TENSORBOARD();
  const TempFolder folder;
  {
    EventWriter events(folder.path());
    for (int64_t step = 1; step <= 5; ++step) {
      events.add_scalar("loss", 1, step);
    }
  }
  EventWriter events(folder.path(), EventWriterOptions().purge_step(4));
  for (int64_t step = 4; step <= 6; ++step) {
    events.add_scalar("loss", 2, step);
  }
  json expected = json::array();
  for (int64_t step = 1; step <= 6; ++step) {
    expected.push_back(json::array({step, step < 4 ? 1.0 : 2.0}));
  }
  EXPECT_EQ(
      read_with_tensorboard(folder.path()).at("curves").at("loss"), expected);
}

TEST(EventWriterTest, ARecordThatAKillToreIsTheEndForTensorBoard) {
  TESSERA_NEEDS_TENSORBOARD();
  const TempFolder folder;
  EventWriter events(folder / "run");
  events.add_scalar("loss", 1, 1);
  const size_t whole = read_bytes(events.path()).size();
  events.add_scalar("loss", 2, 2);
  const size_t end = read_bytes(events.path()).size();
  // Inside of the last checksum, of the payload, of the length.
  for (const size_t size : {end - 1, whole + 20, whole + 5}) {
    fs::resize_file(events.path(), size);
    EXPECT_EQ(
        read_with_tensorboard(folder / "run").at("curves").at("loss"),
        json::array({json::array({1, 1.0})}))
        << size - whole << " bytes of the record";
  }
}

TEST(EventWriterTest, AKillLeavesWholeRecords) {
  const TempFolder folder;
  const fs::path path = folder / "events";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    train::AppendFile file(path, "test");
    const std::vector<EventScalar> scalars{{"loss", 0.5}, {"lr", 1e-3}};
    for (int64_t step = 0;; ++step) {
      file.append(train::framed(train::scalars_event(1.5, step, scalars)));
    }
  }
  while (!fs::exists(path) || fs::file_size(path) < 100000) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const auto found = payloads(path);
  ASSERT_GT(found.size(), 1000);
  for (size_t step = 0; step < found.size(); ++step) {
    const std::vector<EventScalar> scalars{{"loss", 0.5}, {"lr", 1e-3}};
    ASSERT_EQ(
        found[step],
        train::scalars_event(1.5, static_cast<int64_t>(step), scalars));
  }
}

/// No file of this process may grow beyond so many bytes, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(uint64_t bytes) {
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST(EventWriterTest, ARecordThatDoesNotFitIsRemovedAndWarnedOfOnce) {
  const TempFolder folder;
  const Warnings warnings;
  EventWriter events(folder.path());
  events.add_scalar("loss", 1, 1);
  const auto whole = read_bytes(events.path());
  {
    const FileSizeLimit limit(whole.size() + 10);
    events.add_scalar("loss", 2, 2);
  }
  EXPECT_FALSE(events.is_writing());
  events.add_scalar("loss", 3, 3);
  EXPECT_EQ(read_bytes(events.path()), whole);
  EXPECT_EQ(payloads(events.path()).size(), 2);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts[0], HasSubstr("EventWriter: "));
  EXPECT_THAT(warnings.texts[0], HasSubstr("Training continues"));
}

TEST(EventWriterTest, AFolderThatCannotBeMadeIsWarnedOf) {
  const TempFolder folder;
  std::ofstream(folder / "run") << "a file is in the way";
  const Warnings warnings;
  EventWriter events(folder / "run" / "tensorboard");
  EXPECT_FALSE(events.is_writing());
  events.add_scalar("loss", 1, 1);
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST(EventWriterTest, WritersOfOneFolderHaveFilesOfTheirOwn) {
  const TempFolder folder;
  EventWriter one(folder.path());
  EventWriter other(folder.path());
  EXPECT_NE(one.path(), other.path());
  one.add_scalar("loss", 1, 1);
  EXPECT_EQ(payloads(one.path()).size(), 2);
  EXPECT_EQ(payloads(other.path()).size(), 1);
}

TEST(EventWriterTest, RejectsWhatTensorBoardCouldNotRead) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    EventWriter events(folder.path());
    EXPECT_EQ(events.is_writing(), world.rank() == 0);
    // On the rank that writes and on the others.
    EXPECT_THAT(
        error_of([&] { events.add_scalar("", 1, 1); }), HasSubstr("empty"));
    EXPECT_THAT(
        error_of([&] { events.add_scalar("\xff", 1, 1); }),
        HasSubstr("not UTF-8"));
    EXPECT_THAT(
        error_of([&] {
          events.add_step(1, {{"loss", 1}, {"", 2}});
        }),
        HasSubstr("empty"));
    EXPECT_THAT(
        error_of([&] { events.add_scalar("loss", 1, -1); }),
        HasSubstr("step -1 is negative"));
    EXPECT_THAT(
        error_of([&] {
          EventWriter(folder.path(), EventWriterOptions().purge_step(-2));
        }),
        HasSubstr("step -2 is negative"));
    world.barrier();
    if (world.rank() == 0) {
      EXPECT_EQ(payloads(events.path()).size(), 1); // the version
      EXPECT_EQ(testing::names_in(folder.path()).size(), 1);
    } else {
      EXPECT_TRUE(events.path().empty());
    }
  });
}

} // namespace
} // namespace tessera
