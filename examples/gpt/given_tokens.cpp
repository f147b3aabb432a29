#include "given_tokens.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace gpt {
namespace {

tessera::data::TokenFile open_file(const std::string& path) {
  try {
    return tessera::data::TokenFile(path);
  } catch (const tessera::data::DataError& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

nlohmann::json extent_of_tokens(const std::string& path) {
  if (path.empty()) {
    return nullptr;
  }
  const auto file = open_file(path);
  return {
      {"path", path}, {"size", file.size()}, {"vocabulary", file.vocabulary()}};
}

} // namespace

nlohmann::json source_of_given(const DataSettings& settings) {
  const auto& tokenizer = settings.tokenizer;
  nlohmann::json source{
      {"tokens", extent_of_tokens(settings.tokens)},
      {"validation_tokens", extent_of_tokens(settings.validation_tokens)},
      {"tokenizer",
       tokenizer == "none" || tokenizer == "byte" ? tokenizer
                                                  : "tokenizer.json"}};
  const int64_t vocabulary = source["tokens"]["vocabulary"];
  if (tokenizer == "byte" && vocabulary > 256) {
    throw UsageError(
        "--tokenizer byte has 256 tokens, but \"" + settings.tokens +
        "\" has " + std::to_string(vocabulary) +
        ". Give the tokenizer.json that made it, or leave --tokenizer out.");
  }
  return source;
}

std::string described_given(const nlohmann::json& source) {
  const auto& validation = source.at("validation_tokens");
  return std::to_string(source.at("tokens").at("size").get<int64_t>()) +
      " tokens to learn from, " +
      (validation.is_null()
           ? "none"
           : std::to_string(validation.at("size").get<int64_t>())) +
      " to validate with";
}

Corpus open_given(
    const nlohmann::json& source,
    const std::filesystem::path& tokenizer) {
  const auto train = open_file(source.at("tokens").at("path"));
  const auto& validation = source.at("validation_tokens");
  const auto kind = source.at("tokenizer").get<std::string>();
  Corpus corpus{
      .train = train,
      .validation = std::nullopt,
      .tokenizer = kind == "none"
          ? AnyTokenizer(TokenNumbers(train.vocabulary()))
          : kind == "byte" ? AnyTokenizer(Tokenizer())
                           : AnyTokenizer(JsonTokenizer::read(tokenizer))};
  if (!validation.is_null()) {
    corpus.validation = open_file(validation.at("path"));
  }
  return corpus;
}

} // namespace gpt
