// Archives of Python's torch, and archives that are taken apart and put
// together.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/disk/python.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/zip_archive.h"
#include "checkpoint/format/zip_reader.h"
#include "exported/format/archive_reader.h"

namespace tessera::exported {

inline Archive read(const std::string& bytes) {
  return read_archive(format::as_bytes(bytes));
}

/// "accepted", or why the archive is refused.
inline std::string refusal_of(const std::string& bytes) {
  return format::refusal([&] { read(bytes); });
}

/// What tests/exported/make_archives.py writes, once for all tests. Null if
/// there is no Python.
class PythonArchives {
 public:
  static const PythonArchives* get() {
    static const PythonArchives archives;
    return archives.is_there_ ? &archives : nullptr;
  }

  std::string bytes(const std::string& name) const {
    return format::read_file(folder_ / (name + ".pt2"));
  }
  nlohmann::json expected(const std::string& name) const {
    return nlohmann::json::parse(format::read_file(folder_ / (name + ".json")));
  }

 private:
  PythonArchives() {
    const auto python = checkpoint::python_with_torch();
    if (!python.empty()) {
      const auto outcome = checkpoint::run_python(
          python, TESSERA_MAKE_ARCHIVES, {folder_.path()});
      EXPECT_EQ(outcome.status, 0) << outcome.output;
      is_there_ = true;
    }
  }

  checkpoint::ScratchFolder folder_;
  bool is_there_ = false;
};

/// An archive whose entries can be changed.
class OpenArchive {
 public:
  explicit OpenArchive(const std::string& bytes) {
    for (const auto& entry : format::read_zip(format::as_bytes(bytes))) {
      zip_.entries.push_back(
          {.name = entry.name, .data = bytes.substr(entry.offset, entry.size)});
    }
  }

  std::string& at(const std::string& name) {
    for (auto& entry : zip_.entries) {
      if (entry.name.ends_with("/" + name)) {
        return entry.data;
      }
    }
    throw std::runtime_error("no entry " + name);
  }
  OpenArchive& change(
      const std::string& name,
      const std::function<void(nlohmann::json&)>& edit) {
    auto json = nlohmann::json::parse(at(name));
    edit(json);
    at(name) = json.dump();
    return *this;
  }
  OpenArchive& set(const std::string& name, const std::string& data) {
    at(name) = data;
    return *this;
  }
  OpenArchive& remove(const std::string& name) {
    std::erase_if(zip_.entries, [&](const auto& entry) {
      return entry.name.ends_with("/" + name);
    });
    return *this;
  }
  OpenArchive& add(const std::string& name, const std::string& data) {
    zip_.entries.push_back({.name = name, .data = data});
    return *this;
  }
  std::string bytes() const {
    return zip_.bytes();
  }

 private:
  format::ZipArchive zip_;
};

/// The committed archive of make_archives.py --tiny: one linear layer.
inline OpenArchive tiny() {
  return OpenArchive(format::golden("tiny.pt2"));
}

constexpr const char* kModel = "models/model.json";
constexpr const char* kWeights = "data/weights/model_weights_config.json";
constexpr const char* kConstants = "data/constants/model_constants_config.json";

} // namespace tessera::exported
