#include "tokenizer_reader.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "byte_level.h"
#include "json_section.h"
#include "post_processor_reader.h"

namespace gpt {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;
/// Deeper sequences of sequences are not written by anyone.
constexpr size_t kMaxSplits = 16;
/// Added tokens are short; they are compared with the text at every place.
constexpr size_t kMaxAddedBytes = 1024;

// ---- model ------------------------------------------------------------------

std::pair<std::string, std::string> read_merge(
    const json& value,
    const std::string& place) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  } else if (
      value.is_array() && value.size() == 2 && value[0].is_string() &&
      value[1].is_string()) {
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  }
  fail(place + " is " + shown(value) + ", not two tokens");
}

/// Files of an early format have "#version: 0.2" among them.
bool is_version(const json& merge) {
  return merge.is_string() &&
      merge.get_ref<const std::string&>().starts_with("#version");
}

BpeParts read_model(JsonSection model) {
  if (model.text("type") != "BPE") {
    model.refuse("type", "but only \"BPE\" is supported");
  }
  const auto* dropout = model.find("dropout");
  if (dropout != nullptr && !(dropout->is_number() && *dropout == 0)) {
    model.refuse("dropout", "but only null is supported");
  }
  for (const auto* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.find(name) != nullptr && !model.text(name).empty()) {
      model.refuse(name, "but only null is supported");
    }
  }
  if (model.flag("byte_fallback", false)) {
    model.refuse(
        "byte_fallback", "but only byte-level tokenizers are supported");
  }
  BpeParts parts;
  parts.fuses_unknown = model.flag("fuse_unk", false);
  parts.ignores_merges = model.flag("ignore_merges", false);
  if (model.find("unk_token") != nullptr) {
    parts.unknown = model.text("unk_token");
  }
  const auto& vocabulary = model.at("vocab");
  if (!vocabulary.is_object() || vocabulary.empty()) {
    model.refuse("vocab", "not an object with tokens");
  }
  for (const auto& [token, id] : vocabulary.items()) {
    if (token.empty()) {
      fail("model.vocab has a token without text");
    }
    parts.id_of.emplace(
        token, read_id(id, "model.vocab[" + shown(token) + "]"));
  }
  const auto& merges = model.array("merges");
  for (size_t i = 0; i < merges.size(); ++i) {
    if (!is_version(merges[i])) {
      parts.merges.push_back(read_merge(merges[i], element("model.merges", i)));
    }
  }
  model.end();
  return parts;
}

// ---- normalizer, pre_tokenizer, decoder -------------------------------------

bool read_normalizer(JsonSection normalizer) {
  if (normalizer.text("type") != "NFC") {
    normalizer.refuse("type", "but only null and \"NFC\" are supported");
  }
  normalizer.end();
  return true;
}

void read_split(JsonSection split, TokenizerParts& parts) {
  JsonSection pattern(split.at("pattern"), split.place_of("pattern"));
  if (pattern.find("Regex") == nullptr) {
    split.refuse("pattern", "but only {\"Regex\": ...} is supported");
  }
  const auto* known = WordPattern::find(pattern.text("Regex"));
  if (known == nullptr) {
    pattern.refuse(
        "Regex",
        "but only the expressions of these tokenizers are supported: " +
            WordPattern::known_names());
  }
  pattern.end();
  // The patterns match all of a text, so that these two are the same.
  const auto& behavior = split.text("behavior");
  const bool inverts = split.flag("invert", false);
  if (behavior != "Isolated" && !(behavior == "Removed" && inverts)) {
    split.refuse(
        "behavior",
        "but only \"Isolated\", or \"Removed\" with invert, is supported");
  }
  split.end();
  parts.splits.push_back(known);
  if (parts.splits.size() > kMaxSplits) {
    fail(
        "pre_tokenizer has more than " + std::to_string(kMaxSplits) +
        " splits");
  }
}

/// True if it was ByteLevel, which is the last.
bool read_pre_tokenizer(JsonSection section, TokenizerParts& parts) {
  const auto& type = section.text("type");
  if (type == "Split") {
    read_split(section, parts);
    return false;
  }
  if (type == "Sequence") {
    const auto& list = section.array("pretokenizers");
    const auto place = section.place_of("pretokenizers");
    bool is_byte_level = false;
    for (size_t i = 0; i < list.size(); ++i) {
      if (is_byte_level) {
        fail(
            element(place, i) + " follows ByteLevel, which has to be the last");
      }
      is_byte_level =
          read_pre_tokenizer(JsonSection(list[i], element(place, i)), parts);
    }
    section.end();
    return is_byte_level;
  }
  if (type != "ByteLevel") {
    section.refuse(
        "type",
        "but only \"ByteLevel\", \"Split\" and \"Sequence\" are supported");
  }
  section.at("add_prefix_space");
  parts.adds_space = section.flag("add_prefix_space", true);
  parts.splits_like_gpt2 = section.flag("use_regex", true);
  section.ignore("trim_offsets"); // places in the text are not asked for
  section.end();
  return true;
}

void read_decoder(JsonSection decoder) {
  if (decoder.text("type") != "ByteLevel") {
    decoder.refuse("type", "but only \"ByteLevel\" is supported");
  }
  // They do not matter to decoding.
  for (const auto* name : {"add_prefix_space", "trim_offsets", "use_regex"}) {
    decoder.ignore(name);
  }
  decoder.end();
}

// ---- added_tokens -----------------------------------------------------------

/// The numbers are those that the package gives, which ignores the file's: of
/// the vocabulary, or the next ones after it.
void read_added(const json& list, TokenizerParts& parts) {
  if (!list.is_array()) {
    fail("added_tokens is " + shown(list) + ", not a list");
  }
  auto next = static_cast<int64_t>(parts.model.id_of.size());
  std::unordered_set<std::string> contents;
  for (size_t i = 0; i < list.size(); ++i) {
    JsonSection token(list[i], element("added_tokens", i));
    AddedToken added;
    added.content = token.text("content");
    if (added.content.size() > kMaxAddedBytes) {
      token.refuse(
          "content",
          "of more than " + std::to_string(kMaxAddedBytes) + " bytes");
    }
    if (!contents.insert(added.content).second) {
      token.refuse("content", "as is that of another one");
    }
    added.id = read_id(token.at("id"), token.place_of("id"));
    const auto known = parts.model.id_of.find(added.content);
    const int64_t expected =
        known == parts.model.id_of.end() ? next++ : known->second;
    if (added.id != expected) {
      token.refuse(
          "id",
          "but " + std::to_string(expected) + " is the number of \"" +
              added.content +
              (known == parts.model.id_of.end()
                   ? "\": added tokens have the numbers after model.vocab"
                   : "\" in model.vocab"));
    }
    if (token.flag("single_word", false)) {
      token.refuse("single_word", "but only false is supported");
    }
    added.takes_spaces_before = token.flag("lstrip", false);
    added.takes_spaces_after = token.flag("rstrip", false);
    const bool is_normalized = token.flag("normalized", true);
    token.ignore("special"); // whether decoding may leave it out
    token.end();
    if (is_normalized) {
      parts.added_to_normal.push_back(std::move(added));
    } else {
      parts.added.push_back(std::move(added));
    }
  }
}

// ---- all of it --------------------------------------------------------------

/// Refuses two tokens of one number.
void collect_bytes(TokenizerParts& parts) {
  std::unordered_map<int32_t, const std::string*> owners;
  const auto add = [&](int32_t id, const std::string& token, std::string text) {
    const auto [owner, is_new] = owners.emplace(id, &token);
    if (!is_new && *owner->second != token) {
      fail(
          "the tokens \"" + *owner->second + "\" and \"" + token +
          "\" have the same number " + std::to_string(id));
    }
    const auto place = static_cast<size_t>(id);
    parts.bytes_of.resize(std::max(parts.bytes_of.size(), place + 1));
    parts.bytes_of[place] = std::move(text);
  };
  for (const auto& [token, id] : parts.model.id_of) {
    add(id, token, bytes_of_spelled(token).value_or(token));
  }
  for (const auto* list : {&parts.added, &parts.added_to_normal}) {
    for (const AddedToken& token : *list) {
      add(token.id, token.content, token.content);
    }
  }
  for (const auto* list : {&parts.before, &parts.after}) {
    for (const int32_t id : *list) {
      if (!owners.contains(id)) {
        fail(
            "post_processor has the number " + std::to_string(id) +
            ", which no token has");
      }
    }
  }
}

} // namespace

TokenizerParts read_tokenizer_parts(std::string_view text) {
  const json file = parse_strictly(text, kMaxDepth);
  JsonSection all(file, "");
  if (all.find("version") != nullptr && all.text("version") != "1.0") {
    all.refuse("version", "but only \"1.0\" is supported");
  }
  for (const auto* name : {"truncation", "padding"}) {
    if (all.find(name) != nullptr) {
      all.refuse(
          name, "but only null is supported: texts are not cut or filled");
    }
  }
  TokenizerParts parts;
  parts.model = read_model(JsonSection(all.at("model"), "model"));
  if (const auto* normalizer = all.find("normalizer")) {
    parts.to_nfc = read_normalizer(JsonSection(*normalizer, "normalizer"));
  }
  if (!read_pre_tokenizer(
          JsonSection(all.at("pre_tokenizer"), "pre_tokenizer"), parts)) {
    all.refuse(
        "pre_tokenizer",
        "and does not end with ByteLevel; only byte-level tokenizers are "
        "supported");
  }
  read_decoder(JsonSection(all.at("decoder"), "decoder"));
  if (const auto* added = all.find("added_tokens")) {
    read_added(*added, parts);
  }
  if (const auto* processor = all.find("post_processor")) {
    read_post_processor(JsonSection(*processor, "post_processor"), parts);
  }
  all.end();
  collect_bytes(parts);
  return parts;
}

} // namespace gpt
