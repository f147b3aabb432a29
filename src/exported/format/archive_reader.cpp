#include "exported/format/archive_reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/format/format_error.h"
#include "exported/format/archive_files.h"
#include "exported/format/payload_reader.h"
#include "exported/format/program_reader.h"

namespace tessera::exported {
namespace {

using format::FormatError;
using format::in_quotes;
using format::UnsupportedFormat;
using Payloads = std::map<std::string, Payload>;

constexpr const char* kMainProgram = "model";
constexpr const char* kFormatFile = "archive_format";
constexpr const char* kVersionFile = "archive_version";
constexpr const char* kByteOrderFile = "byteorder";
// Written by tessera_export.py alone.
constexpr const char* kTesseraFile = "extra/tessera.json";
constexpr const char* kFormat = "pt2";
constexpr const char* kVersion = "0";

constexpr uint64_t kMaxWordBytes = 64;
// The graph of a model of a hundred layers takes some 50 MB.
constexpr uint64_t kMaxJsonBytes = uint64_t{512} << 20;

struct Folder {
  std::string_view path;
  std::string_view config_ending;
  std::string_view what;
};
constexpr Folder kWeights{"data/weights/", "_weights_config.json", "weight"};
constexpr Folder kConstants{
    "data/constants/",
    "_constants_config.json",
    "constant"};

std::string config_name(const Folder& folder, const std::string& program) {
  return std::string(folder.path) + program + std::string(folder.config_ending);
}

void check_kind(const ArchiveFiles& files) {
  if (!files.has(kFormatFile)) {
    if (files.has("serialized_exported_program.json")) {
      throw UnsupportedFormat(
          "the archive is of torch.export before 2.8; export the model again with a newer torch");
    }
    throw FormatError(
        "the archive has no archive_format: torch.export.save did not write it");
  }
  const auto kind = files.text(kFormatFile, kMaxWordBytes);
  if (kind != kFormat) {
    throw UnsupportedFormat(
        "archive_format is " + in_quotes(kind) + ", not " + in_quotes(kFormat));
  }
  const auto version = files.text(kVersionFile, kMaxWordBytes);
  if (version != kVersion) {
    throw UnsupportedFormat(
        "archive_version is " + in_quotes(version) + ", and version " +
        in_quotes(kVersion) + " is read");
  }
  if (files.has(kByteOrderFile)) {
    const auto order = files.text(kByteOrderFile, kMaxWordBytes);
    if (order != "little") {
      throw UnsupportedFormat(
          "byteorder is " + in_quotes(order) +
          ", and little-endian archives are read");
    }
  }
}

// "model" first: where several programs describe a weight, it counts.
std::vector<std::string> program_names(const ArchiveFiles& files) {
  constexpr std::string_view kFolder = "models/";
  constexpr std::string_view kEnding = ".json";
  std::vector<std::string> names;
  bool has_compiled = false;
  for (const auto& [name, entry] : files.all()) {
    if (name.starts_with(kFolder) && name.ends_with(kEnding) &&
        name.size() > kFolder.size() + kEnding.size()) {
      names.push_back(name.substr(
          kFolder.size(), name.size() - kFolder.size() - kEnding.size()));
    }
    has_compiled |= name.starts_with("data/aotinductor/");
  }
  if (names.empty()) {
    if (has_compiled) {
      throw UnsupportedFormat(
          "the archive holds code that AOTInductor compiled and no program; save it with torch.export.save");
    }
    throw FormatError("the archive has no program: nothing is in models/");
  }
  std::stable_partition(names.begin(), names.end(), [](const auto& name) {
    return name == kMainProgram;
  });
  return names;
}

class ArchiveReader {
 public:
  explicit ArchiveReader(const ArchiveFiles& files) : files_(files) {}

  Archive read() {
    check_kind(files_);
    archive_.names_missing = files_.has(kTesseraFile);
    const auto names = program_names(files_);
    for (const auto& name : names) {
      const std::string entry = "models/" + name + ".json";
      archive_.programs.emplace(
          name, read_program(files_.text(entry, kMaxJsonBytes), entry));
    }
    for (const auto& name : names) {
      take_weights(name);
      take_constants(name);
    }
    for (const auto& [name, program] : archive_.programs) {
      check_tensors(name, program);
    }
    return std::move(archive_);
  }

 private:
  std::optional<Payloads> read_payloads(
      const Folder& folder,
      const std::string& program) const {
    const auto config_file = config_name(folder, program);
    const auto pickle = std::string(folder.path) + program + ".pt";
    if (files_.has(pickle)) {
      throw UnsupportedFormat(
          pickle +
          " is a pickle of an older torch; save the program again with torch 2.9 or newer");
    }
    if (!files_.has(config_file)) {
      return std::nullopt;
    }
    const auto config = read_payload_config(
        files_.text(config_file, kMaxJsonBytes), config_file);
    Payloads payloads;
    for (const auto& [path, entry] : config.entries) {
      const auto file = std::string(folder.path) + entry.file;
      const auto what =
          config_file + ": " + std::string(folder.what) + " " + in_quotes(path);
      const auto* stored = files_.find(file);
      if (!stored) {
        throw FormatError(
            what + " is in " + in_quotes(file) +
            ", which is not in the archive");
      }
      payloads.emplace(path, place_payload(entry, *stored, what));
    }
    return payloads;
  }

  void take_weights(const std::string& program) {
    auto payloads = read_payloads(kWeights, program);
    if (!payloads) {
      if (program == kMainProgram || archive_.programs.size() == 1) {
        throw FormatError(
            "the archive has no " + config_name(kWeights, program));
      }
      return; // shares the weights of the others
    }
    for (auto& [path, payload] : *payloads) {
      const auto [known, is_new] = archive_.weights.emplace(path, payload);
      if (!is_new) {
        check_same(known->second, payload, path, program);
      }
    }
  }

  static void check_same(
      const Payload& known,
      const Payload& again,
      const std::string& path,
      const std::string& program) {
    const auto same = [](const auto& a, const auto& b) {
      return std::equal(
          a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) {
            return x.value == y.value;
          });
    };
    if (known.offset != again.offset || known.meta.dtype != again.meta.dtype ||
        !same(known.meta.sizes, again.meta.sizes) ||
        !same(known.meta.strides, again.meta.strides) ||
        known.meta.storage_offset.value != again.meta.storage_offset.value) {
      throw UnsupportedFormat(
          config_name(kWeights, program) + ": weight " + in_quotes(path) +
          " is another tensor than that of the programs before; programs of one archive are read if they share their weights. tessera_export.py writes such archives");
    }
  }

  void take_constants(const std::string& program) {
    auto payloads = read_payloads(kConstants, program);
    if (!payloads) {
      const auto main = archive_.constants.find(kMainProgram);
      payloads = main == archive_.constants.end() ? Payloads() : main->second;
    }
    archive_.constants.emplace(program, std::move(*payloads));
  }

  void check_tensors(const std::string& name, const Program& program) const {
    const auto& constants = archive_.constants.at(name);
    for (const auto& spec : program.inputs) {
      const auto* buffer = std::get_if<BufferInput>(&spec);
      if (const auto* parameter = std::get_if<ParameterInput>(&spec)) {
        check_tensor(name, program, archive_.weights, kWeights, *parameter);
      } else if (buffer && buffer->persistent) {
        check_tensor(name, program, archive_.weights, kWeights, *buffer);
      } else if (buffer) {
        check_tensor(name, program, constants, kConstants, *buffer);
      } else if (const auto* constant = std::get_if<ConstantInput>(&spec)) {
        check_tensor(name, program, constants, kConstants, *constant);
      }
    }
  }

  template <class Input>
  static void check_tensor(
      const std::string& program_name,
      const Program& program,
      const Payloads& payloads,
      const Folder& folder,
      const Input& input) {
    const auto payload = payloads.find(input.path);
    const std::string what =
        "models/" + program_name + ".json: " + in_quotes(input.path);
    if (payload == payloads.end()) {
      throw FormatError(
          what + " is needed, and no config in " + std::string(folder.path) +
          " has it");
    }
    const auto meta = program.graph.tensors.find(input.name);
    if (meta == program.graph.tensors.end()) {
      throw FormatError(what + " has no entry in tensor_values");
    }
    const auto& sizes = meta->second.sizes;
    const auto& stored = payload->second.meta.sizes;
    if (!std::equal(
            sizes.begin(),
            sizes.end(),
            stored.begin(),
            stored.end(),
            [](const auto& a, const auto& b) { return a.value == b.value; })) {
      throw FormatError(
          what + " has other sizes in the graph than in " +
          std::string(folder.path));
    }
  }

  const ArchiveFiles& files_;
  Archive archive_;
};

} // namespace

bool is_archive(const format::RandomBytes& bytes) {
  const ArchiveFiles files(bytes);
  return files.has(kFormatFile) &&
      files.text(kFormatFile, kMaxWordBytes) == kFormat;
}

Archive read_archive(const format::RandomBytes& bytes) {
  const ArchiveFiles files(bytes);
  return ArchiveReader(files).read();
}

} // namespace tessera::exported
