#include "bpe_model.h"

#include <algorithm>
#include <cstdio>
#include <queue>
#include <stdexcept>

#include "byte_level.h"

namespace gpt {
namespace {

// Words that are longer are rarely met again; with so many words the cache
// begins anew. Together they bound its memory, to some 50 MB.
constexpr size_t kLongestKnownWord = 64;
constexpr size_t kMostKnownWords = size_t{1} << 17;

uint64_t key_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 |
      static_cast<uint32_t>(right);
}

/// A token in a list of those that are left; `next` is -1 at the end.
struct Symbol {
  int32_t token = 0;
  int64_t previous = -1;
  int64_t next = -1;
  bool is_gone = false;
};

/// A merge that is possible, or was when it was noted.
struct Candidate {
  int32_t rank = 0;
  int64_t place = 0; // of the left one
  int32_t token = 0; // what both become

  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : place > other.place;
  }
};

int32_t id_in(
    const BpeParts& parts,
    const std::string& token,
    const std::string& where) {
  const auto found = parts.id_of.find(token);
  if (found == parts.id_of.end()) {
    throw std::runtime_error(
        where + " needs the token \"" + token +
        "\", which is not in model.vocab");
  }
  return found->second;
}

} // namespace

BpeModel::BpeModel(const BpeParts& parts)
    : fuses_unknown_(parts.fuses_unknown) {
  for (size_t byte = 0; byte < token_of_byte_.size(); ++byte) {
    const auto found =
        parts.id_of.find(spelled_byte(static_cast<unsigned char>(byte)));
    token_of_byte_[byte] = found == parts.id_of.end() ? -1 : found->second;
  }
  if (parts.unknown) {
    unknown_ = id_in(parts, *parts.unknown, "model.unk_token");
  }
  merges_.reserve(parts.merges.size());
  for (size_t i = 0; i < parts.merges.size(); ++i) {
    const auto& [left, right] = parts.merges[i];
    const std::string where = "model.merges[" + std::to_string(i) + "]";
    const int32_t left_id = id_in(parts, left, where);
    const int32_t right_id = id_in(parts, right, where);
    merges_[key_of(left_id, right_id)] = {
        .rank = static_cast<int32_t>(i),
        .token = id_in(parts, left + right, where)};
  }
  if (parts.ignores_merges) {
    for (const auto& [spelled, id] : parts.id_of) {
      if (auto bytes = bytes_of_spelled(spelled)) {
        whole_words_.emplace(std::move(*bytes), id);
      }
    }
  }
}

void BpeModel::encode(std::string_view word, std::vector<int32_t>& tokens) {
  const auto whole = whole_words_.find(word);
  if (whole != whole_words_.end()) {
    tokens.push_back(whole->second);
    return;
  }
  const auto known = known_words_.find(word);
  if (known != known_words_.end()) {
    tokens.insert(tokens.end(), known->second.begin(), known->second.end());
    return;
  }
  auto found = merged(tokens_of_bytes(word));
  tokens.insert(tokens.end(), found.begin(), found.end());
  if (word.size() > kLongestKnownWord) {
    return;
  }
  if (known_words_.size() >= kMostKnownWords) {
    known_words_.clear();
  }
  known_words_.emplace(word, std::move(found));
}

std::vector<int32_t> BpeModel::tokens_of_bytes(std::string_view word) const {
  std::vector<int32_t> tokens;
  tokens.reserve(word.size());
  bool follows_unknown = false;
  for (const char character : word) {
    const auto byte = static_cast<unsigned char>(character);
    const int32_t token = token_of_byte_[byte];
    if (token < 0 && unknown_ < 0) {
      char text[96];
      std::snprintf(
          text,
          sizeof(text),
          "the byte 0x%02X has no token in model.vocab, and there is no "
          "model.unk_token.",
          byte);
      throw std::runtime_error(text);
    }
    if (token >= 0) {
      tokens.push_back(token);
    } else if (!follows_unknown || !fuses_unknown_) {
      tokens.push_back(unknown_);
    }
    follows_unknown = token < 0;
  }
  return tokens;
}

const BpeModel::Merge* BpeModel::merge_of(int32_t left, int32_t right) const {
  const auto found = merges_.find(key_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

std::vector<int32_t> BpeModel::merged(
    const std::vector<int32_t>& tokens) const {
  const auto size = std::ssize(tokens);
  std::vector<Symbol> symbols(tokens.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto note = [&](int64_t left, int64_t right) {
    const auto* merge = merge_of(
        symbols[static_cast<size_t>(left)].token,
        symbols[static_cast<size_t>(right)].token);
    if (merge != nullptr) {
      queue.push({.rank = merge->rank, .place = left, .token = merge->token});
    }
  };
  for (int64_t i = 0; i < size; ++i) {
    symbols[static_cast<size_t>(i)] = {
        .token = tokens[static_cast<size_t>(i)],
        .previous = i - 1,
        .next = i + 1 < size ? i + 1 : -1};
  }
  for (int64_t i = 0; i + 1 < size; ++i) {
    note(i, i + 1);
  }
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<size_t>(best.place)];
    if (left.is_gone || left.next < 0) {
      continue;
    }
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    // The neighbours may have changed since it was noted. What they become
    // now is what counts, as in the package that files come from.
    const auto* merge = merge_of(left.token, right.token);
    if (merge == nullptr || merge->token != best.token) {
      continue;
    }
    left.token = best.token;
    left.next = right.next;
    right.is_gone = true;
    if (left.next >= 0) {
      symbols[static_cast<size_t>(left.next)].previous = best.place;
      note(best.place, left.next);
    }
    if (left.previous >= 0) {
      note(left.previous, best.place);
    }
  }
  std::vector<int32_t> left_over;
  for (const Symbol& symbol : symbols) {
    if (!symbol.is_gone) {
      left_over.push_back(symbol.token);
    }
  }
  return left_over;
}

} // namespace gpt
