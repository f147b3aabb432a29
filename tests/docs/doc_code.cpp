// Runs the code of the documents: each block is a test, on the ranks that this
// program is started on. Blocks that must throw need two ranks.
//
//   tessera run -n 2 doc_code
#include "docs/doc_code.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

namespace tessera::docs {

namespace fs = std::filesystem;

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

torch::Tensor loss_of(
    const torch::Tensor& output,
    const torch::Tensor& target) {
  if (target.is_floating_point()) {
    return torch::mse_loss(output.to(torch::kFloat), target);
  }
  return torch::cross_entropy_loss(
      output.to(torch::kFloat).flatten(0, -2), target.flatten());
}

namespace {

fs::path bin_dir() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

/// Words with single blanks between them and # for every number, so that ports,
/// times and sizes may differ.
std::string blurred(const std::string& text) {
  std::string out = std::regex_replace(text, std::regex("\\s+"), " ");
  return std::regex_replace(out, std::regex("[0-9]+(\\.[0-9]+)?"), "#");
}

/// Whether the parts of `wanted` between "..." come in `text` one after
/// another.
bool says(const std::string& text, const std::string& wanted) {
  const std::string said = blurred(text);
  const std::regex dots(" *\\.\\.\\. *");
  const std::string all = blurred(wanted);
  size_t at = 0;
  for (auto part = std::sregex_token_iterator(all.begin(), all.end(), dots, -1);
       part != std::sregex_token_iterator();
       ++part) {
    at = said.find(part->str(), at);
    if (at == std::string::npos) {
      return false;
    }
    at += part->length();
  }
  return true;
}

/// A folder for each block, the same one on all ranks.
class Scratch {
 public:
  explicit Scratch(const std::string& title)
      : before_(fs::current_path()),
        folder_(root() / std::regex_replace(title, std::regex("\\W"), "_")) {
    fs::create_directories(folder_);
    fs::current_path(folder_);
    std::error_code is_there; // another rank may have been faster
    fs::create_symlink(TESSERA_DOC_MODEL, "model.pt2", is_there);
  }
  ~Scratch() {
    fs::current_path(before_);
  }

  /// Ranks of a launcher have it as their parent; alone, this process counts.
  static fs::path root() {
    const int id = std::getenv("RANK") ? getppid() : getpid();
    return fs::temp_directory_path() /
        ("tessera-doc-code-" + std::to_string(id));
  }

  /// Removes what all tests left, when the last rank calls this: a rank that is
  /// done must not remove what another one still writes to.
  static void remove_with_last_rank() {
    const char* rank = std::getenv("RANK");
    const char* size = std::getenv("WORLD_SIZE");
    const int num_ranks = rank && size ? std::stoi(size) : 1;
    fs::create_directories(root() / ("done." + std::string(rank ? rank : "0")));
    int num_done = 0;
    for (int i = 0; i < num_ranks; ++i) {
      num_done += fs::exists(root() / ("done." + std::to_string(i))) ? 1 : 0;
    }
    const fs::path gone = root().string() + ".gone";
    std::error_code taken; // by another rank that saw all of them done
    if (num_done == num_ranks) {
      fs::rename(root(), gone, taken);
      if (!taken) {
        fs::remove_all(gone);
      }
    }
  }

 private:
  fs::path before_, folder_;
};

class BlockTest : public ::testing::Test {
 public:
  explicit BlockTest(const Entry& entry) : entry_(entry) {}

  void TestBody() override {
    const Scratch scratch(entry_.title);
    std::optional<std::string> error;
    try {
      entry_.run();
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    shutdown();
    if (entry_.throws.empty()) {
      EXPECT_FALSE(error) << entry_.title << " throws: " << *error;
    } else if (number_of("RANK", 0) != 0) {
      // A page shows what rank 0 says. A rank that came too late to a barrier
      // learns of it at its next call.
    } else if (!error) {
      FAIL() << entry_.title << " should throw: " << entry_.throws;
    } else {
      EXPECT_TRUE(says(*error, entry_.throws))
          << entry_.title << " throws\n  " << *error << "\nand should\n  "
          << entry_.throws;
    }
  }

 private:
  const Entry& entry_;
};

/// For ranks other than 0: silent unless something fails.
class FailurePrinter : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) {
      std::cout << result.message() << std::endl;
    }
  }
};

void register_tests() {
  const int world_size = number_of("WORLD_SIZE", 1);
  std::sort(
      entries().begin(), entries().end(), [](const Entry& a, const Entry& b) {
        const auto place = [](const Entry& entry) {
          const size_t colon = entry.title.rfind(':');
          return std::pair(
              entry.title.substr(0, colon),
              std::stoi(entry.title.substr(colon + 1)));
        };
        return place(a) < place(b);
      });
  for (const Entry& entry : entries()) {
    if (entry.throws.empty() || world_size > 1) {
      ::testing::RegisterTest(
          ("DocumentsOn" + std::to_string(world_size)).c_str(),
          entry.title.c_str(),
          nullptr,
          nullptr,
          __FILE__,
          __LINE__,
          [&entry] { return new BlockTest(entry); });
    }
  }
}

} // namespace

void write_hugging_face_folder(
    const Group& world,
    const Config& config,
    const std::string& folder) {
  std::optional<std::string> error;
  if (world.rank() == 0) {
    const GPT model(config);
    StateDict state;
    for (const auto& item : model->named_parameters()) {
      const std::string name = std::regex_replace(
          item.key(), std::regex("^blocks\\.(\\d+)\\."), "layers.$1.mlp.");
      state.set("model." + name, item.value().detach());
    }
    fs::create_directories(folder);
    fs::remove(folder);
    checkpoint::save(
        state,
        "for_hugging_face",
        checkpoint::SaveOptions().group(world.alone()));
    const std::string command = (bin_dir() / "tessera").string() +
        " ckpt convert for_hugging_face " + folder +
        " --to safetensors > convert.log 2>&1";
    if (std::system(command.c_str()) != 0) {
      error = command + " failed";
    }
  }
  fail_together(world, "write_hugging_face_folder", error);
}

} // namespace tessera::docs

int main(int argc, char** argv) {
  const bool is_first = tessera::docs::number_of("RANK", 0) == 0;
  // One report, printed by one rank.
  std::vector<char*> words;
  for (int i = 0; i < argc; ++i) {
    if (is_first || !std::string(argv[i]).starts_with("--gtest_output")) {
      words.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(words.size());
  words.push_back(nullptr); // as main's own argv ends
  ::testing::InitGoogleTest(&count, words.data());
  if (!is_first) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new tessera::docs::FailurePrinter);
  }
  torch::set_num_threads(1);
  tessera::docs::register_tests();
  const int result = RUN_ALL_TESTS();
  tessera::docs::Scratch::remove_with_last_rank();
  return result;
}
