#include "post_processor_reader.h"

#include <string>
#include <vector>

namespace gpt {
namespace {

using nlohmann::json;

/// The numbers of a special token of the template.
void add_special(
    const json& specials,
    const std::string& name,
    std::vector<int32_t>& tokens) {
  const std::string place = "post_processor.special_tokens";
  if (!specials.is_object() || !specials.contains(name)) {
    fail(place + " has no \"" + name + "\"");
  }
  JsonSection special(specials.at(name), place + "." + name);
  for (const auto& id : special.array("ids")) {
    tokens.push_back(read_id(id, special.place_of("ids")));
  }
}

void read_template(JsonSection section, TokenizerParts& parts) {
  const auto& specials = section.at("special_tokens");
  const auto& single = section.array("single");
  bool is_after = false;
  for (size_t i = 0; i < single.size(); ++i) {
    JsonSection piece(single[i], element(section.place_of("single"), i));
    if (piece.find("SpecialToken") != nullptr) {
      JsonSection special(
          piece.at("SpecialToken"), piece.place_of("SpecialToken"));
      add_special(
          specials, special.text("id"), is_after ? parts.after : parts.before);
    } else if (is_after) {
      fail(section.place_of("single") + " has the text twice");
    } else {
      piece.at("Sequence");
      is_after = true;
    }
    piece.end();
  }
  if (!is_after) {
    section.refuse("single", "and has no place for the text");
  }
  section.ignore("pair"); // there are no pairs of texts
  section.end();
}

} // namespace

bool read_post_processor(JsonSection section, TokenizerParts& parts) {
  const auto& type = section.text("type");
  if (type == "TemplateProcessing") {
    read_template(section, parts);
    return true;
  }
  if (type == "ByteLevel") {
    return false; // places in the text alone
  }
  if (type != "Sequence") {
    section.refuse(
        "type",
        "but only \"ByteLevel\", \"TemplateProcessing\" and \"Sequence\" are "
        "supported");
  }
  const auto& list = section.array("processors");
  const auto place = section.place_of("processors");
  bool has_template = false;
  for (size_t i = 0; i < list.size(); ++i) {
    const bool is_template =
        read_post_processor(JsonSection(list[i], element(place, i)), parts);
    if (is_template && has_template) {
      fail(element(place, i) + " is a second template, which is not supported");
    }
    has_template = has_template || is_template;
  }
  section.end();
  return has_template;
}

} // namespace gpt
