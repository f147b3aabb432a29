#include "tokenizer.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace gpt {
namespace {

constexpr int32_t kBytes = 256;

enum class Kind { Word, Blank, Other };

Kind kind_of(char character) {
  const auto byte = static_cast<unsigned char>(character);
  if (byte >= 128 || std::isalnum(byte) != 0 || byte == '_') {
    return Kind::Word;
  }
  return std::isspace(byte) != 0 ? Kind::Blank : Kind::Other;
}

struct Word {
  std::vector<int32_t> tokens;
  int64_t count = 0;
};

std::vector<int32_t> bytes_of(std::string_view text) {
  std::vector<int32_t> tokens;
  for (const char character : text) {
    tokens.push_back(static_cast<unsigned char>(character));
  }
  return tokens;
}

bool has_pair(const std::vector<int32_t>& tokens, int32_t left, int32_t right) {
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (tokens[i] == left && tokens[i + 1] == right) {
      return true;
    }
  }
  return false;
}

/// Replaces every `left right` with `token`.
void merge(
    std::vector<int32_t>& tokens,
    int32_t left,
    int32_t right,
    int32_t token) {
  size_t kept = 0;
  for (size_t i = 0; i < tokens.size(); ++i, ++kept) {
    if (i + 1 < tokens.size() && tokens[i] == left && tokens[i + 1] == right) {
      tokens[kept] = token;
      ++i;
    } else {
      tokens[kept] = tokens[i];
    }
  }
  tokens.resize(kept);
}

std::vector<Word> counted_words(std::string_view text) {
  std::map<std::string_view, int64_t> counts;
  for (const auto word : words_of(text)) {
    ++counts[word];
  }
  std::vector<Word> words;
  for (const auto& [word, count] : counts) {
    words.push_back({bytes_of(word), count});
  }
  return words;
}

} // namespace

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = begin + 1;
    if (text[begin] == ' ' && end < text.size() &&
        kind_of(text[end]) != Kind::Blank) {
      ++end; // the blank belongs to the next word
    }
    const Kind kind = kind_of(text[end - 1]);
    while (end < text.size() && kind_of(text[end]) == kind) {
      ++end;
    }
    // The last of several blanks begins the next word.
    if (kind == Kind::Blank && end < text.size() && end - begin > 1 &&
        text[end - 1] == ' ') {
      --end;
    }
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

Tokenizer Tokenizer::learn(std::string_view text, int64_t vocabulary) {
  Tokenizer tokenizer;
  auto words = counted_words(text);
  std::map<Pair, int64_t> counts;
  const auto count_pairs = [&counts](const Word& word, int64_t sign) {
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      counts[{word.tokens[i], word.tokens[i + 1]}] += sign * word.count;
    }
  };
  for (const Word& word : words) {
    count_pairs(word, 1);
  }
  while (tokenizer.vocabulary() < vocabulary) {
    const auto best = std::max_element(
        counts.begin(), counts.end(), [](const auto& a, const auto& b) {
          return a.second < b.second;
        });
    if (best == counts.end() || best->second < 2) {
      break;
    }
    const auto [left, right] = best->first;
    const auto token = static_cast<int32_t>(tokenizer.vocabulary());
    tokenizer.add(best->first);
    for (Word& word : words) {
      if (has_pair(word.tokens, left, right)) {
        count_pairs(word, -1);
        merge(word.tokens, left, right, token);
        count_pairs(word, 1);
      }
    }
    std::erase_if(counts, [](const auto& entry) { return entry.second == 0; });
  }
  return tokenizer;
}

int64_t Tokenizer::vocabulary() const {
  return kBytes + std::ssize(merges_);
}

void Tokenizer::add(Pair pair) {
  const int32_t both[] = {pair.first, pair.second};
  pieces_.push_back(decode(both));
  token_of_[pair] = static_cast<int32_t>(kBytes + merges_.size());
  merges_.push_back(pair);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) {
  std::vector<int32_t> tokens;
  if (merges_.empty()) {
    return bytes_of(text);
  }
  for (const auto word : words_of(text)) {
    const auto [entry, is_new] = known_words_.try_emplace(std::string(word));
    if (is_new) {
      entry->second = encode_word(word);
    }
    tokens.insert(tokens.end(), entry->second.begin(), entry->second.end());
  }
  return tokens;
}

/// Merges the pairs in the order in which they were learned.
std::vector<int32_t> Tokenizer::encode_word(std::string_view word) const {
  auto tokens = bytes_of(word);
  while (true) {
    auto first = token_of_.end();
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = token_of_.find({tokens[i], tokens[i + 1]});
      if (found != token_of_.end() &&
          (first == token_of_.end() || found->second < first->second)) {
        first = found;
      }
    }
    if (first == token_of_.end()) {
      return tokens;
    }
    merge(tokens, first->first.first, first->first.second, first->second);
  }
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocabulary()) {
      throw std::out_of_range(
          "token " + std::to_string(token) + " is not among " +
          std::to_string(vocabulary()));
    }
    if (token < kBytes) {
      text.push_back(static_cast<char>(token));
    } else {
      text += pieces_[static_cast<size_t>(token - kBytes)];
    }
  }
  return text;
}

void Tokenizer::save(const std::filesystem::path& path) const {
  const nlohmann::json saved{{"tokenizer", 1}, {"merges", merges_}};
  std::ofstream file(path);
  file << saved.dump() << "\n";
  if (!file.flush()) {
    throw std::runtime_error("cannot write \"" + path.string() + "\".");
  }
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("cannot read \"" + path.string() + "\".");
  }
  try {
    const auto saved = nlohmann::json::parse(file);
    Tokenizer tokenizer;
    for (const auto& pair : saved.at("merges").get<std::vector<Pair>>()) {
      tokenizer.add(pair); // decodes, and so checks, both parts
    }
    return tokenizer;
  } catch (const std::exception& error) {
    throw std::runtime_error(
        "\"" + path.string() + "\" is not a tokenizer: " + error.what() +
        ". Remove its folder to have it made again.");
  }
}

} // namespace gpt
