#include "checkpoint/disk/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/format/safetensors.h"
#include "support/errors.h"

namespace tessera::checkpoint {
namespace {

using format::read_file;
using format::write_file;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kGoldens = TESSERA_FORMAT_GOLDENS;

std::vector<std::string> names_of(const auto& entries) {
  std::vector<std::string> names;
  for (const auto& entry : entries) {
    names.push_back(entry.name);
  }
  return names;
}

std::string open_error(const fs::path& path) {
  return error_of([&] { Source::open(path); });
}

class SourceTest : public ::testing::Test {
 protected:
  const ScratchFolder folder_;
};

// ---- What is read ----------------------------------------------------------

TEST_F(SourceTest, ReadsADcpFolder) {
  const auto source = Source::open(kGoldens + "/plain");
  EXPECT_EQ(source->format(), Format::Dcp);
  EXPECT_EQ(source->checksums(), nullptr);
  EXPECT_EQ(read_tensor(*source, "model.w"), counting(0, 6));
  EXPECT_EQ(read_tensor(*source, "empty"), "");
  const auto* step = source->find_tensor("optim.state.0.step");
  ASSERT_TRUE(step);
  EXPECT_EQ(step->sizes, std::vector<int64_t>{});
  EXPECT_EQ(
      step->keys,
      (std::vector<format::DcpPath::Key>{"optim", "state", "0", "step"}));
  const auto* rate = source->find_value("optim.param_groups.0.lr");
  ASSERT_TRUE(rate);
  EXPECT_EQ(
      rate->keys,
      (std::vector<format::DcpPath::Key>{
          "optim", "param_groups", int64_t{0}, "lr"}));
  EXPECT_EQ(source->value(*rate), format::Value(0.1));
  EXPECT_EQ(source->find_value("model.w"), nullptr);
  EXPECT_EQ(source->find_tensor("nothing"), nullptr);
}

TEST_F(SourceTest, OpensADcpFolderByItsMetadata) {
  const auto source = Source::open(kGoldens + "/plain/.metadata");
  EXPECT_EQ(source->format(), Format::Dcp);
  EXPECT_TRUE(source->find_tensor("model.w"));
}

TEST_F(SourceTest, ReadsSafetensors) {
  const auto source = Source::open(kGoldens + "/kinds.safetensors");
  EXPECT_EQ(source->format(), Format::Safetensors);
  EXPECT_EQ(read_tensor(*source, "w"), counting(0, 6));
  EXPECT_EQ(read_tensor(*source, "m"), std::string("\1\0\1", 3));
  EXPECT_EQ(source->find_tensor("e")->boxes.size(), 0);
  EXPECT_EQ(source->find_tensor("s")->dtype, DType::Float64);
}

TEST_F(SourceTest, ReadsSafetensorsThroughTheirIndex) {
  const auto source = Source::open(kGoldens + "/model.safetensors.index.json");
  EXPECT_EQ(read_tensor(*source, "w"), counting(0, 6));
  EXPECT_EQ(source->tensors().size(), 6);
}

// A safetensors file of tensors that count up from `first`.
void write_safetensors(
    const fs::path& path,
    const std::vector<std::string>& names,
    int64_t first = 0) {
  format::SafetensorsHeader header;
  for (const auto& name : names) {
    header.tensors.push_back(
        {.name = name, .dtype = DType::Float32, .sizes = {2}});
  }
  std::string bytes = format::lay_out_safetensors(&header);
  for (size_t i = 0; i < names.size(); ++i) {
    bytes += counting(first + static_cast<int64_t>(i) * 2, 2);
  }
  write_file(path, bytes);
}

TEST_F(SourceTest, ReadsSafetensorsWhoseHeaderHasAnyLength) {
  // The file begins with the header's length; 0x80 also begins old torch files.
  bool met = false;
  for (size_t length = 1; length <= 300; ++length) {
    const auto path = folder_ / "x.safetensors";
    write_safetensors(path, {std::string(length, 'n')});
    met = met || std::ifstream(path).get() == 0x80;
    EXPECT_EQ(Source::open(path)->tensors().size(), 1) << length;
  }
  EXPECT_TRUE(met);
}

TEST_F(SourceTest, ReadsFoldersOfSafetensors) {
  fs::create_directory(folder_ / "one");
  write_safetensors(folder_ / "one/x.safetensors", {"a"});
  EXPECT_EQ(read_tensor(*Source::open(folder_ / "one"), "a"), counting(0, 2));

  write_safetensors(folder_ / "one/y.safetensors", {"b"}, 10);
  EXPECT_THAT(
      open_error(folder_ / "one"),
      AllOf(HasSubstr("several"), HasSubstr("\"y.safetensors\"")));

  write_file(
      folder_ / "one/model.safetensors.index.json",
      R"({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})");
  const auto both = Source::open(folder_ / "one");
  EXPECT_EQ(read_tensor(*both, "a"), counting(0, 2));
  EXPECT_EQ(read_tensor(*both, "b"), counting(10, 2));
}

// The trainer exports the model beside the checkpoints of its run.
TEST_F(SourceTest, AsksWhichCheckpointOfARunIsMeant) {
  const fs::path run = folder_ / "run";
  fs::create_directories(run / "checkpoints");
  for (const char* step : {"step_00000002", "step_00000010"}) {
    fs::copy(kGoldens + "/plain", run / "checkpoints" / step);
  }
  fs::create_directory_symlink("checkpoints/step_00000010", run / "best");
  const auto names_both_steps = AllOf(
      HasSubstr("\"checkpoints/step_00000002\", "
                "\"checkpoints/step_00000010\""),
      HasSubstr("Give the path of one of them"));
  EXPECT_THAT(open_error(run), names_both_steps);
  EXPECT_THAT(open_error(run / "checkpoints"), HasSubstr("\"step_00000010\""));

  write_safetensors(run / "model.safetensors", {"a"});
  EXPECT_THAT(
      open_error(run),
      AllOf(names_both_steps, HasSubstr("\"model.safetensors\"")));
}

TEST_F(SourceTest, TakesASharedTensorFromTheFileTheIndexNames) {
  write_safetensors(folder_ / "x.safetensors", {"a", "shared"});
  write_safetensors(folder_ / "y.safetensors", {"b", "shared"}, 10);
  write_file(
      folder_ / "model.safetensors.index.json",
      R"({"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "shared": "y.safetensors"}})");
  EXPECT_EQ(
      read_tensor(*Source::open(folder_.path()), "shared"), counting(12, 2));
}

TEST_F(SourceTest, RejectsAnIndexThatDoesNotFit) {
  write_safetensors(folder_ / "x.safetensors", {"a"});
  write_file(
      folder_ / "model.safetensors.index.json",
      R"({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}})");
  EXPECT_THAT(
      open_error(folder_.path()),
      AllOf(HasSubstr("x.safetensors"), HasSubstr("\"b\" is not in it")));
  write_file(
      folder_ / "model.safetensors.index.json",
      R"({"weight_map": {"a": "gone.safetensors"}})");
  EXPECT_THAT(
      open_error(folder_.path()),
      AllOf(HasSubstr("gone.safetensors"), HasSubstr("missing")));
}

TEST_F(SourceTest, ReadsTorchFiles) {
  const auto source = Source::open(kGoldens + "/kinds.pt");
  EXPECT_EQ(source->format(), Format::TorchFile);
  // [[6, 7], [10, 11]], a view of twelve.
  EXPECT_EQ(read_tensor(*source, "view"), counting(6, 2) + counting(10, 2));
  std::string transposed;
  for (const int64_t element : {0, 3, 1, 4, 2, 5}) {
    format::append_number(&transposed, element);
  }
  EXPECT_EQ(read_tensor(*source, "transposed"), transposed);
  EXPECT_EQ(
      source->value(*source->find_value("5")),
      format::Value("a number as key"));
  EXPECT_TRUE(source->int_keys().contains("5"));
  EXPECT_TRUE(source->find_value("tuple"));
  EXPECT_TRUE(source->find_value("bools")); // a list of plain values
  EXPECT_THAT(
      error_of([&] { read_tensor(*source, "conj"); }),
      AllOf(HasSubstr("\"conj\""), HasSubstr("resolve_conj")));
}

TEST_F(SourceTest, ReadsAnOptimizersDictionary) {
  const auto source = Source::open(kGoldens + "/optim.pt");
  EXPECT_TRUE(source->find_tensor("state.0.exp_avg"));
  EXPECT_TRUE(source->find_tensor("state.1.step"));
  EXPECT_TRUE(source->find_value("param_groups.0.lr"));
  EXPECT_TRUE(source->find_value("param_groups.0.params"));
  EXPECT_THAT(source->int_keys(), ElementsAre("state.0", "state.1"));
}

// As torch's traverse_state_dict() does it.
TEST_F(SourceTest, NamesNestedValuesAsTorchDoes) {
  const auto list = [](std::vector<format::Value> items) {
    return format::Value(format::List{std::move(items)});
  };
  format::Dict inner;
  inner.add("x", 1);
  format::Dict root;
  root.add("plain", list({1, list({2})}));
  root.add("deep", list({list({inner}), 7}));
  root.add("none", format::Dict{});
  root.add("tuple", format::Tuple{{inner}});
  root.add(true, 8);
  write_file(folder_ / "t.pt", torch_file(root));

  const auto source = Source::open(folder_ / "t.pt");
  EXPECT_THAT(
      names_of(source->values()),
      ElementsAre("plain", "deep.0.0.x", "deep.1", "tuple", "True"));
  EXPECT_THAT(
      source->empty_dicts(),
      ElementsAre(std::vector<format::DcpPath::Key>{"none"}));
}

TEST_F(SourceTest, RejectsTorchFilesThatAreNoStateDict) {
  write_file(folder_ / "list.pt", torch_file(format::List{{1}}));
  EXPECT_THAT(
      open_error(folder_ / "list.pt"),
      AllOf(HasSubstr("a list"), HasSubstr("state_dict()")));
  format::Dict twice;
  twice.add("1", 0);
  twice.add(1, 0);
  write_file(folder_ / "twice.pt", torch_file(twice));
  EXPECT_THAT(
      open_error(folder_ / "twice.pt"), HasSubstr("two entries are named"));
  format::Dict odd;
  odd.add(format::Tuple{{1}}, 0);
  write_file(folder_ / "odd.pt", torch_file(odd));
  EXPECT_THAT(open_error(folder_ / "odd.pt"), HasSubstr("a tuple"));
  write_file(folder_ / "old.pt", "\x80\x02}.");
  EXPECT_THAT(open_error(folder_ / "old.pt"), HasSubstr("before 1.6"));
}

// ---- What is not a checkpoint
// -------------------------------------------------

TEST_F(SourceTest, RejectsWhatIsNoCheckpoint) {
  EXPECT_THAT(
      open_error(folder_ / "gone"),
      AllOf(HasSubstr("/gone\""), HasSubstr("No such file")));
  EXPECT_THAT(
      open_error(folder_.path()),
      AllOf(HasSubstr("empty"), HasSubstr(".metadata")));
  write_file(folder_ / "notes.txt", "hello");
  EXPECT_THAT(
      open_error(folder_.path()),
      AllOf(HasSubstr("\"notes.txt\""), HasSubstr(".metadata")));
  EXPECT_THAT(open_error(folder_ / "notes.txt"), HasSubstr("neither"));
  write_file(folder_ / "__0_0.distcp", "x");
  EXPECT_THAT(open_error(folder_.path()), HasSubstr("did not complete"));
}

TEST_F(SourceTest, TellsOfASaveThatWasInterrupted) {
  fs::create_directory(folder_ / ".step_5.partial");
  EXPECT_THAT(
      open_error(folder_ / "step_5"),
      AllOf(HasSubstr(".step_5.partial"), HasSubstr("interrupted")));
}

TEST_F(SourceTest, RejectsPipesInsteadOfWaiting) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(open_error(folder_ / "pipe"), HasSubstr("not a regular file"));
}

// A mapped file ends the process if another process truncates it.
TEST_F(SourceTest, MapsNoFile) {
  const auto source = Source::open(kGoldens + "/kinds.pt");
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  EXPECT_THAT(text, Not(HasSubstr("kinds.pt")));
}

TEST_F(SourceTest, SurvivesFilesThatAreCutOffWhileTheyAreRead) {
  HandmadeDcp dcp(folder_ / "d", {90'000});
  dcp.add_rows("f", 0, 90'000);
  dcp.write();
  fs::copy_file(kGoldens + "/kinds.pt", folder_ / "t.pt");
  fs::copy_file(kGoldens + "/kinds.safetensors", folder_ / "s.safetensors");
  const std::vector<fs::path> files{
      folder_ / "d" / ".metadata",
      folder_ / "d" / "f",
      folder_ / "t.pt",
      folder_ / "s.safetensors"};
  std::vector<std::string> contents;
  for (const auto& file : files) {
    contents.push_back(read_file(file));
  }
  std::atomic<bool> ends = false;
  std::thread other([&] {
    while (!ends) {
      for (size_t i = 0; i < files.size(); ++i) {
        fs::resize_file(files[i], 0);
        write_file(files[i], contents[i]);
      }
    }
  });
  for (int i = 0; i < 300; ++i) {
    for (const char* name : {"d", "t.pt", "s.safetensors"}) {
      error_of([&] {
        const auto source = Source::open(folder_ / name);
        for (const auto& tensor : source->tensors()) {
          for (const auto& box : tensor.boxes) {
            source->locate(tensor, box);
          }
        }
      });
    }
  }
  ends = true;
  other.join();
}

// ---- Hostile and damaged DCP folders ---------------------------------------

TEST_F(SourceTest, ReadsBoxesOfSeveralFiles) {
  HandmadeDcp dcp(folder_ / "d", {5, 3});
  dcp.add_rows("__1_0.distcp", 3, 2);
  dcp.add_rows("__0_0.distcp", 0, 3);
  dcp.write();
  const auto source = Source::open(folder_ / "d");
  EXPECT_EQ(read_tensor(*source, "w"), counting(0, 15));
  EXPECT_THAT(
      names_of(source->files()), ElementsAre("__1_0.distcp", "__0_0.distcp"));
}

TEST_F(SourceTest, RejectsMissingAndCutFiles) {
  HandmadeDcp dcp(folder_ / "d", {5});
  dcp.add_rows("a", 0, 5);
  dcp.write();
  fs::resize_file(folder_ / "d/a", 100);
  EXPECT_THAT(
      open_error(folder_ / "d"),
      AllOf(
          HasSubstr("/d/a\", item of \"w\" at byte 0"),
          HasSubstr("the file ends at 100")));
  fs::remove(folder_ / "d/a");
  EXPECT_THAT(
      open_error(folder_ / "d"),
      AllOf(HasSubstr("/d/a"), HasSubstr("missing")));
}

TEST_F(SourceTest, RejectsLengthsThatLie) {
  HandmadeDcp dcp(folder_ / "d", {5});
  dcp.add_rows("a", 0, 5);
  auto& storage = *dcp.tensor().chunks[0].storage;
  const int64_t length = storage.length;
  storage.length = INT64_MAX;
  dcp.write();
  EXPECT_THAT(open_error(folder_ / "d"), HasSubstr("the file ends at"));
  storage.length = length - 1;
  dcp.write();
  const auto source = Source::open(folder_ / "d");
  EXPECT_THAT(
      error_of([&] { read_tensor(*source, "w"); }),
      AllOf(HasSubstr("item of \"w\""), HasSubstr("ZIP")));
}

TEST_F(SourceTest, RejectsItemsOfAnotherKindThanPromised) {
  const auto error_with = [&](const format::Value& value, int64_t numel) {
    const fs::path folder = folder_ / "d";
    fs::remove_all(folder);
    HandmadeDcp dcp(folder, {5});
    dcp.add_item("a", {0}, {5}, torch_file(value, counting(0, numel)));
    dcp.write();
    return error_of([&] { read_tensor(*Source::open(folder), "w"); });
  };
  EXPECT_EQ(error_with(float_tensor({5}, 5), 5), "nothing was thrown");
  EXPECT_THAT(
      error_with(float_tensor({4}, 4), 4),
      HasSubstr("a tensor of sizes [4], [5] is promised"));
  auto ints = float_tensor({5}, 5);
  ints.dtype = DType::Int32;
  ints.storage.dtype = DType::Int32;
  EXPECT_THAT(error_with(ints, 5), HasSubstr("int32, float32 is promised"));
  EXPECT_THAT(error_with(7, 0), HasSubstr("found an int"));
  auto far = float_tensor({5}, 5);
  far.offset = 1;
  EXPECT_THAT(error_with(far, 5), HasSubstr("beyond"));
}

TEST_F(SourceTest, RejectsBoxesThatDoNotTile) {
  HandmadeDcp dcp(folder_ / "d", {4});
  dcp.add_rows("a", 0, 2);
  dcp.add_rows("b", 1, 2);
  dcp.write();
  EXPECT_THAT(
      open_error(folder_ / "d"),
      AllOf(HasSubstr("tensor \"w\""), HasSubstr("overlap")));
  dcp.tensor().chunks.pop_back();
  dcp.write();
  EXPECT_THAT(
      open_error(folder_ / "d"), HasSubstr("2 of its 4 elements are missing"));
}

TEST_F(SourceTest, RejectsExtensionsByTheirName) {
  HandmadeDcp dcp(folder_ / "d", {4});
  dcp.add_rows("a", 0, 4);
  dcp.tensor().chunks[0].storage->transforms = {"stream.zstd"};
  dcp.write();
  const auto source = Source::open(folder_ / "d");
  EXPECT_THAT(
      error_of([&] { read_tensor(*source, "w"); }),
      AllOf(HasSubstr("\"w\""), HasSubstr("stream.zstd")));
}

TEST_F(SourceTest, RejectsPathsThatLeaveTheFolder) {
  write_file(
      folder_ / "secret", torch_file(float_tensor({4}, 4), counting(0, 4)));
  HandmadeDcp dcp(folder_ / "d", {4});
  dcp.add_rows("a", 0, 4);
  std::string& file = dcp.tensor().chunks[0].storage->file;
  const std::string absolute = folder_ / "secret";
  for (const auto& path : {std::string("../secret"), absolute}) {
    file = path;
    dcp.write();
    EXPECT_THAT(
        open_error(folder_ / "d"),
        AllOf(HasSubstr(".metadata"), HasSubstr("relative_path")));
  }
}

TEST_F(SourceTest, RejectsLinksThatLeaveTheFolder) {
  fs::create_directory(folder_ / "outside");
  HandmadeDcp dcp(folder_ / "d", {4});
  dcp.add_rows("a", 0, 4);
  dcp.write();
  fs::rename(folder_ / "d/a", folder_ / "outside/a");
  // The file itself.
  fs::create_symlink(folder_ / "outside/a", folder_ / "d/a");
  EXPECT_THAT(
      open_error(folder_ / "d"),
      AllOf(HasSubstr("symbolic link"), HasSubstr("outside/a")));
  // A folder on the way.
  fs::remove(folder_ / "d/a");
  fs::create_directory_symlink(folder_ / "outside", folder_ / "d/sub");
  dcp.tensor().chunks[0].storage->file = "sub/a";
  dcp.write();
  EXPECT_THAT(open_error(folder_ / "d"), HasSubstr("symbolic link"));
  // Folders whose names only begin alike.
  fs::remove(folder_ / "d/sub");
  fs::create_directory(folder_ / "dd");
  fs::rename(folder_ / "outside/a", folder_ / "dd/a");
  fs::create_directory_symlink("../dd", folder_ / "d/sub");
  EXPECT_THAT(open_error(folder_ / "d"), HasSubstr("symbolic link"));
  // The description.
  fs::rename(folder_ / "d/.metadata", folder_ / "outside/m");
  fs::create_symlink(folder_ / "outside/m", folder_ / "d/.metadata");
  EXPECT_THAT(open_error(folder_ / "d"), HasSubstr("symbolic link"));
}

TEST_F(SourceTest, FollowsLinksInsideTheFolderAndToIt) {
  HandmadeDcp dcp(folder_ / "d", {4});
  dcp.add_rows("a", 0, 4);
  fs::rename(folder_ / "d/a", folder_ / "d/b");
  fs::create_symlink("b", folder_ / "d/a");
  dcp.write();
  fs::create_directory_symlink("d", folder_ / "latest");
  EXPECT_EQ(
      read_tensor(*Source::open(folder_ / "latest"), "w"), counting(0, 4));
}

// ---- Checksums -------------------------------------------------------------

class SummedSourceTest : public SourceTest {
 protected:
  void SetUp() override {
    HandmadeDcp dcp(folder_ / "d", {4});
    dcp.add_rows("a", 0, 4);
    dcp.write();
    dcp.write_checksums();
  }

  template <class Error>
  void expect_at_open(const std::string& text) {
    try {
      Source::open(folder_ / "d");
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
    // Those who look for damage can still look.
    EXPECT_TRUE(Source::open(folder_ / "d", Sums::Ignore)->find_tensor("w"));
  }
};

TEST_F(SummedSourceTest, ReadsWithChecksums) {
  const auto source = Source::open(folder_ / "d");
  ASSERT_TRUE(source->checksums());
  EXPECT_EQ(source->checksums()->files.size(), 2);
  EXPECT_EQ(read_tensor(*source, "w"), counting(0, 4));
}

TEST_F(SummedSourceTest, RejectsDamagedChecksums) {
  std::string text = format::read_file(folder_ / "d/.checksums");
  text[text.size() / 2] ^= 1;
  write_file(folder_ / "d/.checksums", text);
  expect_at_open<DamageError>(".checksums");
}

TEST_F(SummedSourceTest, RejectsAnotherFilesSize) {
  std::string bytes = format::read_file(folder_ / "d/a");
  write_file(folder_ / "d/a", bytes + "x");
  expect_at_open<DamageError>("were written");
}

TEST_F(SummedSourceTest, RejectsFilesThatAreNotInTheChecksums) {
  write_file(
      folder_ / "d/.checksums", checkpoint::write_checksums(Checksums{}));
  expect_at_open<DamageError>("two checkpoints");
}

TEST_F(SummedSourceTest, RejectsADescriptionThatWasChanged) {
  std::string bytes = format::read_file(folder_ / "d/.metadata");
  const size_t at = bytes.find("1.0.0");
  ASSERT_NE(at, std::string::npos);
  bytes[at + 4] = '1';
  write_file(folder_ / "d/.metadata", bytes);
  expect_at_open<DamageError>(".metadata");
}

} // namespace
} // namespace tessera::checkpoint
