#include "checkpoint/format/safetensors_index.h"

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/path.h"

namespace tessera::format {
namespace {

// Other programs put anything into "metadata".
constexpr int kIndexDepth = 16;

} // namespace

SafetensorsIndex read_safetensors_index(std::string_view text) {
  const auto json = read_json(text, 0, kIndexDepth);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) {
    throw FormatError("the index has no weight_map");
  }
  SafetensorsIndex index;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string()) {
      throw FormatError("the file of " + in_quotes(name) + " is not a string");
    }
    const auto& path = file.get_ref<const std::string&>();
    if (const auto why = why_it_leaves(path); !why.empty()) {
      throw FormatError(
          "the file of " + in_quotes(name) + ", " + in_quotes(path) + ", " +
          std::string(why));
    }
    index.files.emplace(name, path);
  }
  const auto metadata = json.find("metadata");
  if (metadata != json.end() && metadata->is_object()) {
    const auto total = metadata->find("total_size");
    if (total != metadata->end() && total->is_number_unsigned()) {
      index.total_bytes = total->get<uint64_t>();
    }
  }
  return index;
}

std::string write_safetensors_index(const SafetensorsIndex& index) {
  nlohmann::ordered_json json;
  json["metadata"] = nlohmann::ordered_json::object();
  if (index.total_bytes) {
    json["metadata"]["total_size"] = *index.total_bytes;
  }
  json["weight_map"] = index.files;
  return json.dump(2) + "\n";
}

} // namespace tessera::format
