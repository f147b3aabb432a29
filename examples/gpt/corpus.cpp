#include "corpus.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "file_lock.h"
#include "given_tokens.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSource = "source.json";
constexpr const char* kTokenizer = "tokenizer.json";
constexpr const char* kTrain = "train.tokens";
constexpr const char* kValidation = "validation.tokens";

/// After this many bytes of text, a part is set aside for validation.
constexpr size_t kStretch = 1 << 16;

std::vector<fs::path> files_of(const DataSettings& settings) {
  const fs::path folder = settings.text;
  std::error_code error;
  if (fs::is_regular_file(folder, error)) {
    return {folder};
  }
  const auto is_left_out = [&](const fs::path& path) {
    std::error_code missing; // it is not there yet, then
    return std::any_of(
        settings.left_out.begin(),
        settings.left_out.end(),
        [&](const fs::path& other) {
          return fs::equivalent(path, other, missing);
        });
  };
  std::vector<fs::path> paths;
  for (auto entry = fs::recursive_directory_iterator(folder, error);
       !error && entry != fs::recursive_directory_iterator();
       entry.increment(error)) {
    std::error_code unknown; // such as a dangling link: not text
    if (entry->is_directory(unknown) && is_left_out(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file(unknown)) {
      paths.push_back(entry->path());
    }
  }
  if (error) {
    throw std::runtime_error(
        "cannot read the folder of text \"" + folder.string() +
        "\": " + error.message() + ".");
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool is_text(const std::string& bytes) {
  const auto looked_at = std::min<size_t>(bytes.size(), 4096);
  return bytes.find('\0') >= looked_at;
}

struct Text {
  std::string bytes;
  int64_t num_files = 0;
};

/// The files in the order of their paths, until there are `enough` bytes.
Text read_text(const DataSettings& settings) {
  const int64_t enough = settings.text_bytes;
  Text text;
  for (const auto& path : files_of(settings)) {
    if (std::ssize(text.bytes) >= enough) {
      break;
    }
    std::ifstream file(path, std::ios::binary);
    const auto size = std::min<int64_t>(
        static_cast<int64_t>(fs::file_size(path)),
        enough - std::ssize(text.bytes));
    std::string bytes(static_cast<size_t>(size), '\0');
    if (!file.read(bytes.data(), size)) {
      throw std::runtime_error("cannot read \"" + path.string() + "\".");
    }
    if (is_text(bytes)) {
      text.bytes += bytes;
      ++text.num_files;
    }
  }
  if (text.bytes.empty()) {
    throw std::runtime_error("there is no text in \"" + settings.text + "\".");
  }
  return text;
}

/// Notices text that was added or removed since. Empty if the folder is gone:
/// only the tokens are needed.
nlohmann::json extent_of(const DataSettings& settings) {
  std::error_code error;
  if (!fs::exists(settings.text, error)) {
    return nullptr;
  }
  int64_t num_files = 0;
  int64_t num_bytes = 0;
  for (const auto& path : files_of(settings)) {
    ++num_files;
    num_bytes += static_cast<int64_t>(fs::file_size(path, error));
  }
  return {{"files", num_files}, {"bytes", num_bytes}};
}

bool has_tokenizer_file(const DataSettings& settings) {
  const auto& name = settings.tokenizer;
  return name != "byte" && name != "bpe" && name != "none";
}

/// Notices a tokenizer.json that has changed. Empty if it is gone: the folder
/// has a copy.
nlohmann::json fingerprint_of(const DataSettings& settings) {
  std::error_code error;
  if (!fs::exists(settings.tokenizer, error)) {
    return nullptr;
  }
  const auto text = JsonTokenizer::text_of(settings.tokenizer);
  uint64_t hash = 0xcbf29ce484222325U; // FNV-1a
  for (const char byte : text) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
  }
  return {{"bytes", text.size()}, {"hash", hash}};
}

nlohmann::json source_of(const DataSettings& settings) {
  if (!settings.tokens.empty()) {
    auto source = source_of_given(settings);
    if (has_tokenizer_file(settings)) {
      source["tokenizer_file"] = fingerprint_of(settings);
    }
    return source;
  }
  if (has_tokenizer_file(settings)) { // wherever it is
    return {
        {"extent", extent_of(settings)},
        {"text", fs::absolute(settings.text).lexically_normal().string()},
        {"text_bytes", settings.text_bytes},
        {"tokenizer", "tokenizer.json"},
        {"tokenizer_file", fingerprint_of(settings)},
        {"validation", settings.validation}};
  }
  return {
      {"extent", extent_of(settings)},
      {"text", fs::absolute(settings.text).lexically_normal().string()},
      {"text_bytes", settings.text_bytes},
      {"tokenizer", settings.tokenizer},
      {"vocabulary",
       settings.tokenizer == "bpe" ? settings.vocabulary : int64_t{256}},
      {"validation", settings.validation}};
}

/// Throws if `folder` was made from something else. Returns a sentence about
/// it.
std::string check_source(
    const fs::path& folder,
    const nlohmann::json& wanted,
    bool is_trained_on) {
  std::ifstream file(folder / kSource);
  const auto found = nlohmann::json::parse(file, nullptr, false);
  const std::string using_them = "using the tokens in " + folder.string();
  // What may be gone or, once a model learned from the tokens, have changed.
  std::string remarks;
  auto same = wanted;
  for (const auto& [key, what] :
       {std::pair("extent", "the text they were made from"),
        std::pair(
            "tokenizer_file", "the tokenizer.json they were made with")}) {
    if (!found.is_object() || !wanted.contains(key) || !found.contains(key) ||
        found.at(key) == wanted.at(key)) {
      continue;
    }
    const bool is_gone = wanted.at(key).is_null();
    if (is_gone || is_trained_on) {
      same[key] = found.at(key);
      remarks += std::string("; ") + what +
          (is_gone ? " is gone" : " has changed since");
    }
  }
  if (found == same) {
    return using_them + remarks;
  }
  std::string text =
      "the tokens in \"" + folder.string() + "\" were made from something else";
  for (const auto& [key, value] : wanted.items()) {
    if (!found.is_object() || found.value(key, nlohmann::json()) != value) {
      text += "; " + key + " was " +
          (found.is_object() ? found.value(key, nlohmann::json()).dump()
                             : "not noted") +
          " and is " + value.dump();
    }
  }
  throw std::runtime_error(
      text +
      ". Give the settings they were made with, another --data, or "
      "remove the folder.");
}

/// The files appear complete or not at all.
void write_file(const fs::path& path, std::string_view text) {
  const fs::path beside = path.string() + ".partial";
  std::ofstream file(beside, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    throw std::runtime_error("cannot write \"" + beside.string() + "\".");
  }
  fs::rename(beside, path);
}

void write_json(const fs::path& path, const nlohmann::json& value) {
  const auto text =
      value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  write_file(path, text + "\n");
}

/// Reads the tokenizer.json that was given, and copies it into the folder.
AnyTokenizer copy_tokenizer(
    const DataSettings& settings,
    const fs::path& folder) {
  const auto file = JsonTokenizer::text_of(settings.tokenizer);
  auto tokenizer = JsonTokenizer::parse(file, settings.tokenizer);
  write_file(folder / kTokenizer, file);
  return tokenizer;
}

/// Makes the tokenizer, and writes it into the folder.
AnyTokenizer make_tokenizer(
    const DataSettings& settings,
    std::string_view text,
    const fs::path& folder) {
  if (has_tokenizer_file(settings)) {
    return copy_tokenizer(settings, folder);
  }
  auto tokenizer = settings.tokenizer == "bpe"
      ? Tokenizer::learn(text, settings.vocabulary)
      : Tokenizer();
  tokenizer.save(folder / kTokenizer);
  return tokenizer;
}

void write_tokens(
    const fs::path& path,
    const std::vector<int32_t>& tokens,
    int64_t vocabulary) {
  tessera::data::TokenFileWriter writer(path, vocabulary);
  writer.append(tokens);
  writer.close();
}

tessera::data::TokenFile open_tokens(const fs::path& path) {
  try {
    return tessera::data::TokenFile(path);
  } catch (const tessera::data::DataError& error) {
    throw std::runtime_error(
        std::string(error.what_without_backtrace()) + " Remove \"" +
        path.parent_path().string() + "\" to have the tokens made again.");
  }
}

/// The place at or before `end` where a character of UTF-8 begins; `end` where
/// the text is something else.
size_t whole_characters(std::string_view text, size_t end) {
  for (size_t back = 0; back < 4 && back < end && end < text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[end - back]);
    if ((byte & 0xc0U) != 0x80) {
      return end - back;
    }
  }
  return end;
}

} // namespace

std::string prepare_corpus(
    const DataSettings& settings,
    const fs::path& folder,
    bool is_trained_on) {
  const auto source = source_of(settings);
  std::optional<FileLock> lock;
  if (!fs::exists(folder / kSource)) { // written last
    lock.emplace(folder / ".lock");
  }
  if (fs::exists(folder / kSource)) { // or meanwhile, by somebody else
    return check_source(folder, source, is_trained_on);
  }
  if (!settings.tokens.empty()) {
    if (has_tokenizer_file(settings)) {
      copy_tokenizer(settings, folder);
    }
    write_json(folder / kSource, source);
    return "using " + settings.tokens + ": " + described_given(source);
  }
  const Text text = read_text(settings);
  AnyTokenizer tokenizer = make_tokenizer(settings, text.bytes, folder);

  const std::string_view bytes = text.bytes;
  std::vector<int32_t> train;
  std::vector<int32_t> validation;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = whole_characters(bytes, begin + kStretch);
    const auto stretch = bytes.substr(begin, end - begin);
    const auto cut = whole_characters(
        stretch,
        static_cast<size_t>(
            static_cast<double>(stretch.size()) * (1 - settings.validation)));
    const auto seen = tokenizer.encode(stretch.substr(0, cut));
    const auto unseen = tokenizer.encode(stretch.substr(cut));
    train.insert(train.end(), seen.begin(), seen.end());
    validation.insert(validation.end(), unseen.begin(), unseen.end());
    begin = end;
  }
  write_tokens(folder / kTrain, train, tokenizer.vocabulary());
  write_tokens(folder / kValidation, validation, tokenizer.vocabulary());
  write_json(folder / kSource, source);
  return "read " + std::to_string(text.num_files) +
      (text.num_files == 1 ? " file, " : " files, ") +
      std::to_string(text.bytes.size()) +
      " bytes: " + std::to_string(train.size()) + " tokens to learn from, " +
      std::to_string(validation.size()) + " to validate with, " +
      std::to_string(tokenizer.vocabulary()) + " different ones";
}

Corpus open_corpus(const fs::path& folder) {
  std::ifstream file(folder / kSource);
  const auto source = nlohmann::json::parse(file, nullptr, false);
  const bool has_file = source.is_object() && source.contains("tokenizer_file");
  const auto path = folder / kTokenizer;
  if (source.is_object() && source.contains("tokens")) {
    return open_given(source, path);
  }
  return {
      .train = open_tokens(folder / kTrain),
      .validation = open_tokens(folder / kValidation),
      .tokenizer = has_file ? AnyTokenizer(JsonTokenizer::read(path))
                            : AnyTokenizer(Tokenizer::load(path))};
}

} // namespace gpt
