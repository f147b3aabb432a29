#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <thread>
#include <utility>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class ConvertTest : public ::testing::Test {
 protected:
  // Runs it and expects success.
  std::string run(const std::vector<std::string>& words) const {
    const auto result = ckpt(words);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return result.output;
  }

  // Runs it and expects an error, and nothing left behind.
  std::string refused(const std::vector<std::string>& words) const {
    const auto before = names_in(folder_.path());
    const auto result = ckpt(words);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_EQ(names_in(folder_.path()), before);
    return result.output;
  }

  const ScratchFolder folder_;
};

TEST_F(ConvertTest, AnyFormatToAnyAndBack) {
  const fs::path dcp = folder_ / "dcp";
  const fs::path safetensors = folder_ / "s.safetensors";
  const fs::path torch = folder_ / "t.pt";
  const fs::path again = folder_ / "again";
  const std::string from = kGoldens + "/kinds.safetensors";
  run({"convert", from, dcp, "--to", "dcp"});
  run({"convert", dcp, torch, "--to", "torch"});
  run({"convert", torch, safetensors, "--to", "safetensors"});
  run({"convert", safetensors, folder_ / "t2.pt", "--to", "torch"});
  run({"convert", torch, again, "--to", "dcp"});
  for (const auto& path : {dcp, torch, safetensors, again}) {
    EXPECT_THAT(
        run({"diff", from, path}), HasSubstr("6 the same, 0 different"));
    EXPECT_THAT(run({"verify", path}), HasSubstr("sound"));
  }
}

TEST_F(ConvertTest, KeepsNestedValuesAndNames) {
  const std::string from = kGoldens + "/plain";
  run({"convert", from, folder_ / "t.pt", "--to", "torch"});
  EXPECT_THAT(run({"diff", from, folder_ / "t.pt"}), HasSubstr("0 different"));
  const auto source = Source::open(folder_ / "t.pt");
  EXPECT_EQ(
      source->find_tensor("optim.state.0.step")->keys,
      (std::vector<format::DcpPath::Key>{"optim", "state", "0", "step"}));
  EXPECT_TRUE(source->int_keys().empty()); // DCP knows strings only
}

TEST_F(ConvertTest, KeepsIntKeysOfATorchFile) {
  const std::string from = kGoldens + "/optim.pt";
  run({"convert", from, folder_ / "t.pt", "--to", "torch"});
  EXPECT_EQ(
      Source::open(folder_ / "t.pt")->int_keys(),
      Source::open(from)->int_keys());
  run(
      {"convert",
       from,
       folder_ / "p.pt",
       "--to",
       "torch",
       "--key-prefix",
       "optim"});
  EXPECT_THAT(
      Source::open(folder_ / "p.pt")->int_keys(),
      ElementsAre("optim.state.0", "optim.state.1"));
}

TEST_F(ConvertTest, WritesSafetensorsInSeveralFiles) {
  HandmadeDcp dcp(folder_ / "d", {1000});
  dcp.add_rows("a", 0, 1000);
  dcp.write();
  run(
      {"convert",
       folder_ / "d",
       folder_ / "t.pt",
       "--to",
       "torch",
       "--key-prefix",
       "first"});
  // Two tensors of 4000 bytes do not fit into one file of 5 kB.
  format::Dict two;
  auto tensor = float_tensor({1000}, 1000);
  two.add("a", tensor);
  two.add("b", tensor);
  format::write_file(folder_ / "two.pt", torch_file(two, counting(0, 1000)));
  run(
      {"convert",
       folder_ / "two.pt",
       folder_ / "s",
       "--to",
       "safetensors",
       "--max-shard-size",
       "5kB"});
  EXPECT_THAT(
      names_in(folder_ / "s"),
      ElementsAre(
          ".checksums",
          "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors",
          "model.safetensors.index.json"));
  EXPECT_THAT(
      run({"diff", folder_ / "two.pt", folder_ / "s"}),
      HasSubstr("2 the same, 0 different"));
  EXPECT_THAT(run({"verify", folder_ / "s"}), HasSubstr("checksums"));
  run({"convert", folder_ / "s", folder_ / "one", "--to", "safetensors"});
  EXPECT_THAT(
      names_in(folder_ / "one"),
      ElementsAre(".checksums", "model.safetensors"));
}

TEST_F(ConvertTest, KeepsNotesOfSafetensors) {
  format::SafetensorsHeader header;
  header.tensors = {{.name = "w", .dtype = DType::Float32, .sizes = {2}}};
  header.metadata = {{"author", "me"}, {"format", "mlx"}};
  format::write_file(
      folder_ / "a.safetensors",
      format::lay_out_safetensors(&header) + counting(0, 2));
  run(
      {"convert",
       folder_ / "a.safetensors",
       folder_ / "b",
       "--to",
       "safetensors"});
  EXPECT_EQ(Source::open(folder_ / "b")->notes(), header.metadata);
  EXPECT_THAT(
      run({"inspect", folder_ / "b"}), HasSubstr("note \"author\": \"me\""));
  run(
      {"convert",
       kGoldens + "/weights.pt",
       folder_ / "w.safetensors",
       "--to",
       "safetensors"});
  EXPECT_EQ(
      Source::open(folder_ / "w.safetensors")->notes(),
      (std::map<std::string, std::string>{{"format", "pt"}}));
}

TEST_F(ConvertTest, SelectsAndRenames) {
  const std::string from = kGoldens + "/plain";
  run(
      {"convert",
       from,
       folder_ / "m.safetensors",
       "--to",
       "safetensors",
       "--select",
       "model",
       "--strip-prefix",
       "model"});
  const auto source = Source::open(folder_ / "m.safetensors");
  EXPECT_EQ(source->tensors().size(), 2);
  EXPECT_EQ(read_tensor(*source, "w"), counting(0, 6));
  EXPECT_THAT(
      refused(
          {"convert",
           from,
           folder_ / "x",
           "--to",
           "dcp",
           "--strip-prefix",
           "model"}),
      AllOf(HasSubstr("does not begin with"), HasSubstr("--select model")));
  EXPECT_THAT(
      refused(
          {"convert", from, folder_ / "x", "--to", "dcp", "--select", "mod"}),
      HasSubstr("nothing is left"));
}

TEST_F(ConvertTest, CastsFloatingPoint) {
  run(
      {"convert",
       kGoldens + "/kinds.safetensors",
       folder_ / "h.safetensors",
       "--to",
       "safetensors",
       "--dtype",
       "fp16"});
  const auto source = Source::open(folder_ / "h.safetensors");
  EXPECT_EQ(source->find_tensor("w")->dtype, DType::Float16);
  EXPECT_EQ(
      read_tensor(*source, "w"),
      std::string("\0\0\0\x3c\0\x40\0\x42\0\x44\0\x45", 12));
  EXPECT_EQ(source->find_tensor("b")->dtype, DType::Float16);
  EXPECT_EQ(source->find_tensor("i")->dtype, DType::Int64);
  EXPECT_EQ(source->find_tensor("s")->dtype, DType::Float64); // has no dims
}

TEST_F(ConvertTest, RejectsValuesThatSafetensorsCannotHold) {
  const std::string from = kGoldens + "/plain";
  EXPECT_THAT(
      refused({"convert", from, folder_ / "s", "--to", "safetensors"}),
      AllOf(
          HasSubstr("\n  epoch"),
          HasSubstr("param_groups.0.lr"),
          HasSubstr("--drop-values")));
  EXPECT_THAT(
      run(
          {"convert",
           from,
           folder_ / "s",
           "--to",
           "safetensors",
           "--drop-values"}),
      HasSubstr("values left out"));
  for (const char* flag : {"--drop-values", "--max-shard-size=1MB"}) {
    EXPECT_THAT(
        refused({"convert", from, folder_ / "d", "--to", "dcp", flag}),
        HasSubstr("belong to --to safetensors"));
  }
}

TEST_F(ConvertTest, RejectsTensorsInsideOfTuples) {
  format::Dict root;
  root.add("pair", format::Tuple{{float_tensor({4}, 4)}});
  format::write_file(folder_ / "t.pt", torch_file(root, counting(0, 4)));
  for (const std::string to : {"dcp", "torch"}) {
    EXPECT_THAT(
        refused({"convert", folder_ / "t.pt", folder_ / "x", "--to", to}),
        AllOf(HasSubstr("\"pair\""), HasSubstr("tuple")));
  }
}

TEST_F(ConvertTest, ReplacesOnlyWhenAsked) {
  const std::string from = kGoldens + "/kinds.safetensors";
  for (const std::string to : {"dcp", "torch"}) {
    const std::string path = folder_ / to;
    run({"convert", from, path, "--to", to, "--select", "w"});
    EXPECT_THAT(
        refused({"convert", from, path, "--to", to}), HasSubstr("already"));
    EXPECT_EQ(Source::open(path)->tensors().size(), 1);
    run({"convert", from, path, "--to", to, "--overwrite"});
    EXPECT_EQ(Source::open(path)->tensors().size(), 6);
  }
  fs::create_directory(folder_ / "mine");
  format::write_file(folder_ / "mine/diary.txt", "dear");
  refused({"convert", from, folder_ / "mine", "--to", "dcp", "--overwrite"});
  refused({"convert", from, folder_ / "mine", "--to", "torch", "--overwrite"});
  EXPECT_EQ(format::read_file(folder_ / "mine/diary.txt"), "dear");
}

// A source that turns out to be damaged in the middle.
TEST_F(ConvertTest, LeavesNothingBehindAfterAnError) {
  HandmadeDcp dcp(folder_ / "d", {900'000});
  dcp.add_rows("f", 0, 900'000);
  dcp.write();
  dcp.write_checksums();
  flip_bit(folder_ / "d/f", 3'000'000);
  for (const std::string to : {"dcp", "safetensors", "torch"}) {
    EXPECT_THAT(
        refused({"convert", folder_ / "d", folder_ / "x", "--to", to}),
        HasSubstr("not those that were written"));
  }
  EXPECT_THAT(
      refused(
          {"convert",
           folder_ / "d",
           folder_ / "x.safetensors",
           "--to",
           "safetensors"}),
      HasSubstr("not those that were written"));
}

// The leftovers of a crash do not prevent a conversion, a running one does.
TEST_F(ConvertTest, RemovesThePartialFileOfACrash) {
  const std::string from = kGoldens + "/kinds.safetensors";
  fs::create_directory(folder_ / ".t.pt.partial");
  format::write_file(folder_ / ".t.pt.partial" / "file", "half");
  run({"convert", from, folder_ / "t.pt", "--to", "torch"});
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("t.pt"));
}

/// A tensor of 40 GB that takes no space, and longer to write than the test
/// takes to interrupt it.
void write_endless(const fs::path& path) {
  const std::string size = "40000000000";
  const std::string header = R"({"w":{"dtype":"U8","shape":[)" + size +
      R"(],"data_offsets":[0,)" + size + "]}}";
  std::string bytes;
  format::append_number(&bytes, static_cast<uint64_t>(header.size()));
  format::write_file(path, bytes + header);
  fs::resize_file(path, 8 + header.size() + 40'000'000'000);
}

class InterruptTest : public ::testing::Test {
 protected:
  // A shell's background job ignores SIGINT, and so would its children.
  void SetUp() override {
    std::signal(SIGINT, SIG_DFL);
    std::signal(SIGTERM, SIG_DFL);
  }

  /// Converts until something is written, then sends the signal.
  int interrupted(const std::string& to, const std::string& path, int signal) {
    tessera::testing::Command command(
        {tessera::testing::tessera_program(),
         "ckpt",
         "convert",
         folder_ / "endless.safetensors",
         folder_ / path,
         "--to",
         to});
    const fs::path partial = folder_ / ("." + path + ".partial");
    for (int i = 0; i < 50'000 && !has_bytes(partial); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(has_bytes(partial));
    ::kill(command.pid(), signal);
    return command.wait().exit_code;
  }

  static bool has_bytes(const fs::path& folder) {
    std::error_code error;
    for (fs::recursive_directory_iterator it(folder, error), end;
         !error && it != end;
         it.increment(error)) {
      std::error_code gone;
      if (it->is_regular_file(gone) && it->file_size(gone) > 0 && !gone) {
        return true;
      }
    }
    return false;
  }

  const ScratchFolder folder_;
};

TEST_F(InterruptTest, LeavesNothing) {
  write_endless(folder_ / "endless.safetensors");
  for (const int signal : {SIGINT, SIGTERM}) {
    for (const auto& [to, path] :
         std::vector<std::pair<std::string, std::string>>{
             {"dcp", "d"},
             {"safetensors", "folder"},
             {"safetensors", "x.safetensors"},
             {"torch", "x.pt"}}) {
      SCOPED_TRACE(path + " " + std::to_string(signal));
      EXPECT_EQ(interrupted(to, path, signal), 128 + signal);
      EXPECT_THAT(names_in(folder_.path()), ElementsAre("endless.safetensors"));
    }
  }
}

TEST_F(InterruptTest, AKilledOneLeavesNothingThatLooksWhole) {
  write_endless(folder_ / "endless.safetensors");
  EXPECT_EQ(interrupted("dcp", "d", SIGKILL), 128 + SIGKILL);
  EXPECT_EQ(interrupted("torch", "x.pt", SIGKILL), 128 + SIGKILL);
  EXPECT_THAT(
      names_in(folder_.path()),
      ElementsAre(".d.partial", ".x.pt.partial", "endless.safetensors"));
  const std::string from = kGoldens + "/kinds.safetensors";
  for (const auto& [to, path] :
       std::map<std::string, std::string>{{"dcp", "d"}, {"torch", "x.pt"}}) {
    EXPECT_EQ(ckpt({"convert", from, folder_ / path, "--to", to}).exit_code, 0);
  }
  EXPECT_THAT(
      names_in(folder_.path()),
      ElementsAre("d", "endless.safetensors", "x.pt"));
}

TEST_F(ConvertTest, LeavesOutWhatIsExcluded) {
  const std::string from = kGoldens + "/kinds.safetensors";
  const auto all = Source::open(from)->tensors().size();
  const std::string name = Source::open(from)->tensors()[0].name;
  run({"convert", from, folder_ / "t", "--to", "dcp", "--exclude", name});
  const auto source = Source::open(folder_ / "t");
  EXPECT_EQ(source->tensors().size(), all - 1);
  EXPECT_EQ(source->find_tensor(name), nullptr);
}

TEST_F(ConvertTest, RejectsAFileThatAnotherProcessIsWriting) {
  const fs::path partial = folder_ / ".t.pt.partial";
  fs::create_directory(partial);
  format::write_file(partial / "file", "half");
  const int other = ::open(partial.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  EXPECT_THAT(
      refused(
          {"convert",
           kGoldens + "/kinds.safetensors",
           folder_ / "t.pt",
           "--to",
           "torch"}),
      HasSubstr("another save to"));
  EXPECT_EQ(format::read_file(partial / "file"), "half");
  ::close(other);
}

TEST_F(ConvertTest, ReshardsAndConsolidates) {
  HandmadeDcp dcp(folder_ / "two", {5, 3});
  dcp.add_rows("__0_0.distcp", 0, 3);
  dcp.add_rows("__1_0.distcp", 3, 2);
  dcp.write();
  run({"reshard", folder_ / "two", folder_ / "four", "--world", "4"});
  const auto four = Source::open(folder_ / "four");
  std::vector<int64_t> rows;
  for (const auto& box : four->tensors()[0].boxes) {
    rows.push_back(box.sizes[0]);
  }
  EXPECT_THAT(rows, ElementsAre(2, 2, 1)); // as torch.chunk() does
  EXPECT_EQ(read_tensor(*four, "w"), counting(0, 15));
  EXPECT_TRUE(four->checksums());
  EXPECT_THAT(
      names_in(folder_ / "four"),
      ElementsAre(
          ".checksums",
          ".metadata",
          "__0_0.distcp",
          "__1_0.distcp",
          "__2_0.distcp",
          "__3_0.distcp"));
  run({"consolidate", folder_ / "four", folder_ / "one"});
  const auto one = Source::open(folder_ / "one");
  EXPECT_EQ(one->tensors()[0].boxes.size(), 1);
  EXPECT_EQ(read_tensor(*one, "w"), counting(0, 15));
  run({"consolidate", folder_ / "four", folder_ / "one.pt", "--to", "torch"});
  EXPECT_EQ(
      read_tensor(*Source::open(folder_ / "one.pt"), "w"), counting(0, 15));
}

TEST_F(ConvertTest, KeepsNumbersAndEmptyTensorsWhenResharding) {
  const std::string from = kGoldens + "/plain";
  run({"reshard", from, folder_ / "three", "--world", "3"});
  EXPECT_THAT(run({"diff", from, folder_ / "three"}), HasSubstr("0 different"));
}

TEST_F(ConvertTest, RejectsBadOptions) {
  const std::string from = kGoldens + "/plain";
  EXPECT_EQ(ckpt({"convert", from, folder_ / "x"}).exit_code, 2);
  EXPECT_EQ(
      ckpt({"convert", from, folder_ / "x", "--to", "onnx"}).exit_code, 2);
  EXPECT_EQ(
      ckpt({"reshard", from, folder_ / "x", "--world", "0"}).exit_code, 2);
  EXPECT_THAT(
      refused(
          {"convert",
           from,
           folder_ / "x",
           "--to",
           "safetensors",
           "--drop-values",
           "--max-shard-size",
           "many"}),
      HasSubstr("5GB"));
  EXPECT_THAT(
      refused({"convert", folder_ / "gone", folder_ / "x", "--to", "dcp"}),
      HasSubstr("No such file"));
  EXPECT_THAT(
      refused({"convert", from, folder_ / "no/x", "--to", "dcp"}),
      HasSubstr("parent folder"));
}

} // namespace
} // namespace tessera::checkpoint
